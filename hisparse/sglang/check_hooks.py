"""Checks that the plugin's hooks and imports fit the installed SGLang.

``python -m hisparse.sglang.check_hooks`` loads the plugin as SGLang does and prints one JSON
object: ``hooks`` and ``used`` are counts, ``problems`` is a list of lines. ``hisparse doctor`` runs
the check in a separate process because the import of SGLang takes seconds and may fail.
"""

import ast
import inspect
import json
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hisparse.errors import HiSparseError
from hisparse.sglang import features, install, plugin


def signature_mismatch(wrapper: Callable[..., Any], original: Callable[..., Any]) -> str | None:
    """Compare the signature of a hook with the SGLang function that the hook wraps.

    Args:
        wrapper: the hook; takes the original function, then the original's arguments.
        original: SGLang's function.

    Returns:
        The mismatch in words, or None if the hook accepts every call of ``original``.
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
    """One line for each hook or name that does not fit, of all features.

    The caller loads SGLang's plugins first.
    """
    features.enable(features.all_features())
    problems, hooks = [], plugin.hooks_in_use()
    try:
        install.install(hooks)
    except HiSparseError as error:
        problems.append(str(error))
    for target, wrapper in hooks.items():
        original = install.original_of(target)
        reason = original and signature_mismatch(wrapper, original)
        if reason:
            problems.append(f"the hook on {target} does not fit: {reason}")
    for name in used_names():
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            problems.append(f"{name}, which hisparse uses, does not exist: {error}")
    return problems


def used_names() -> list[str]:
    """Names of SGLang that the plug-in's files import."""
    found = set[str]()
    for path in Path(__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return sorted(found)


def _main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    problems = find_problems()
    found = {"hooks": len(plugin.hooks_in_use()), "used": len(used_names()), "problems": problems}
    print(json.dumps(found))


if __name__ == "__main__":
    _main()
