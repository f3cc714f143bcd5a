"""Installs hooks in SGLang, and verifies that they are in place."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from typing import Any

from hisparse.errors import PluginError

#: SGLang's functions before the hooks wrapped them, by dotted name.
_originals: dict[str, object] = {}


def register(hooks: Mapping[str, Callable[..., Any]]) -> None:
    """Register the hooks that are not yet; SGLang's ``apply_hooks`` installs them."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, wrapper in hooks.items():
        if target not in _originals:
            _originals[target] = _resolve(target)
            HookRegistry.register(target, wrapper, HookType.AROUND)


def install(hooks: Mapping[str, Callable[..., Any]]) -> None:
    """Install hooks in this process.

    Raises:
        PluginError: one is not in place.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    register(hooks)
    HookRegistry.apply_hooks()
    verify(hooks)


def verify(targets: Iterable[str]) -> None:
    """Verify that hooks are installed.

    Raises:
        PluginError: names the hook that is not, and the release of SGLang.
    """
    for target in targets:
        now = _resolve(target)
        if now is None:
            raise PluginError(does_not_fit(f"{target} does not exist"))
        if now is original_of(target):
            raise PluginError(does_not_fit(f"the hook on {target} was not installed"))


def original_of(target: str) -> Any:
    """SGLang's function before its hook wrapped it; None: it does not exist or has no hook."""
    return _originals.get(target)


def does_not_fit(what: str) -> str:
    """A line that names the release of SGLang."""
    return f"hisparse does not fit sglang {version('sglang')}: {what}"


def _resolve(target: str) -> object:
    """The object of a dotted name, or None if the name does not exist."""
    try:
        found: object = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return None
    # Each access to a class method makes a new bound object; its function stays the same.
    return getattr(found, "__func__", found)
