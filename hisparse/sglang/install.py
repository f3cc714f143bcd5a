"""The supported release of SGLang, hisparse's names in it, and the installation of hooks.

Imports nothing that takes time: every process of every server does.
"""

import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from hisparse.errors import PluginError

#: The release of SGLang that hisparse supports.
RELEASE: Final = "0.5.23"

#: Names of the attention backend in SGLang, and of that of draft models.
BACKEND: Final = "hisparse"
DRAFT_BACKEND: Final = "hisparse_draft"
#: SGLang's flags that name a backend.
BACKEND_FLAGS: Final = (
    "attention_backend", "prefill_attention_backend", "decode_attention_backend",
)  # fmt: skip

#: SGLang's functions before the hooks wrapped them, by dotted name.
_originals: dict[str, object] = {}


def installed_release() -> str | None:
    """Version of the installed SGLang, or None if SGLang is not installed."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def is_supported(found: str) -> bool:
    """Whether a version is that of :data:`RELEASE`, or of a build of it, such as a post-release."""
    return re.match(rf"{re.escape(RELEASE)}(?!\d)", found) is not None


def is_requested(server_args: Any) -> bool:
    """Whether one of SGLang's three attention backend flags names hisparse."""
    return any(getattr(server_args, flag, None) == BACKEND for flag in BACKEND_FLAGS)


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
            raise PluginError(does_not_fit(f"got no {target}, expected it: install sglang again"))
        if now is original_of(target):
            what = f"the hook on {target} was not installed, expected hisparse's in its place"
            raise PluginError(does_not_fit(f"{what}: SGLANG_PLUGINS=hisparse loads no other"))


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
