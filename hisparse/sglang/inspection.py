"""Loads the plugin as SGLang does and prints, as JSON, what does not fit.

``python -m hisparse.sglang.inspection``: ``hooks`` and ``used`` are counts, ``problems`` one line
each. It runs in a process of its own because SGLang takes seconds to import and may fail to.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
from collections.abc import Callable
from typing import Any

from hisparse.errors import HiSparseError

__all__ = ["find_problems", "takes"]


def takes(wrapper: Callable[..., Any], original: Callable[..., Any]) -> str | None:
    """Whether a hook accepts what callers give the function that it wraps.

    Args:
        wrapper: called with the original function and then its arguments.
        original: SGLang's.

    Returns:
        None, or what does not fit.
    """
    positional: list[object] = []
    named: dict[str, object] = {}
    for name, parameter in inspect.signature(original).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            positional.append(name)
        elif parameter.kind is parameter.KEYWORD_ONLY:
            named[name] = name
    try:
        inspect.signature(wrapper).bind(original, *positional, **named)
    except TypeError as error:
        return f"its arguments are {inspect.signature(original)}: {error}"
    return None


def find_problems() -> list[str]:
    """One line for each hook or name that does not fit; SGLang's plugins have to be loaded."""
    from hisparse.sglang import names, plugin

    problems = []
    try:
        plugin.verify_hooks()
    except HiSparseError as error:
        problems.append(str(error))
    for target, original, wrapper in plugin.hooked():
        reason = takes(wrapper, original)
        if reason is not None:
            problems.append(f"the hook on {target} does not fit: {reason}")
    for name in names.USED:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            problems.append(f"{name}, which hisparse uses, is gone: {error}")
    return problems


def _main() -> None:
    from sglang.srt.plugins import load_plugins

    from hisparse.sglang import names

    load_plugins()
    found = {"hooks": len(names.HOOKS), "used": len(names.USED), "problems": find_problems()}
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
