"""Registers the attention backend and the hooks, and verifies that each hook is installed.

SGLang loads this module in each process of each server, also of those that do not use hisparse.
They get the two hooks that see a server's arguments. The other hooks, and all imports that take
time, wait until the arguments ask for hisparse.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

from hisparse.errors import HiSparseError, PluginError
from hisparse.sglang.names import HOOKS, RELEASE, is_supported
from hisparse.sglang.requested import BACKEND, DRAFT_BACKEND, is_requested

__all__ = ["install_hooks", "installed_hooks", "register", "verify_hooks"]


#: Tells the processes that a server starts to install all hooks: it is set in their environment.
_IN_USE = "HISPARSE_IN_USE"

#: SGLang's functions before the hooks wrapped them, by dotted name.
_originals: dict[str, object] = {}
_launched_by_command_line = False


def register() -> None:
    """Register the backend and hooks: those on server arguments, or all if hisparse is in use.

    :func:`verify_hooks` reports names that do not exist.

    SGLang only logs exceptions of a plugin. If the command line asks for hisparse, a failure
    therefore ends the process: the server would otherwise run without hisparse.
    """
    try:
        _register()
    except Exception as error:
        if BACKEND in sys.argv:
            line = _wrong_release() or _does_not_fit(str(error))
            raise SystemExit(f"hisparse: error: {line}") from error
        raise


def _wrong_release() -> str | None:
    """What to install in place of a release that is not supported; None: it is supported."""
    found = version("sglang")
    if is_supported(found):
        return None
    return (
        f"got sglang {found}, expected {RELEASE}, the release that hisparse supports: "
        f"pip install sglang=={RELEASE}"
    )


def _check_release() -> None:
    line = _wrong_release()
    if line is not None:
        raise PluginError(line)


def _does_not_fit(what: str) -> str:
    return f"hisparse does not fit sglang {version('sglang')}: {what}"


def _register() -> None:
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
    )
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(_make_backend)
    register_attention_backend(DRAFT_BACKEND)(_make_draft_backend)
    _register_hooks(HOOKS if os.environ.get(_IN_USE) else _ARGUMENT_HOOKS)


def _register_hooks(targets: Iterable[str]) -> None:
    """Register the hooks that are not yet; SGLang's ``apply_hooks`` installs them."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target in targets:
        if target not in _originals:
            _originals[target] = _resolve(target)
            HookRegistry.register(target, _wrapper(target), HookType.AROUND)


def install_hooks() -> None:
    """Install all hooks in this process, after :func:`register`."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    _register_hooks(HOOKS)
    HookRegistry.apply_hooks()


def _wrapper(target: str) -> Callable[..., Any]:
    """The wrapper of the function that a dotted name ends with."""
    name = target.rpartition(".")[2]
    if target in _ARGUMENT_HOOKS:
        return _ARGUMENT_WRAPPERS[name]
    from hisparse.sglang.wrappers import WRAPPERS

    return WRAPPERS[name]


def _resolve(target: str) -> object:
    """The object behind a dotted name, or None if the name does not exist."""
    try:
        found: object = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return None
    # Each access to a class method makes a new bound object; its function stays the same.
    return getattr(found, "__func__", found)


def installed_hooks() -> list[tuple[str, Any, Callable[..., Any]]]:
    """Name, original function and wrapper of each hook on an existing function."""
    triples = ((t, _originals.get(t), _wrapper(t)) for t in HOOKS)
    return [(target, before, wrapper) for target, before, wrapper in triples if before is not None]


def verify_hooks() -> None:
    """Verify that every hook is installed.

    Raises:
        PluginError: names the hook that is not, and the release of SGLang.
    """
    for target in HOOKS:
        now = _resolve(target)
        if now is None:
            raise PluginError(_does_not_fit(f"{target} does not exist"))
        if now is _originals.get(target):
            raise PluginError(_does_not_fit(f"the hook on {target} was not installed"))


def _make_backend(model_runner: Any) -> Any:
    verify_hooks()
    if model_runner.device == "cpu":
        _replace_triton()
    from hisparse.sglang.absorbed_mla import use_absorbed_mla
    from hisparse.sglang.backend import HiSparseAttnBackend
    from hisparse.sglang.features import dsa
    from hisparse.sglang.session import errors_logged, require_session

    if require_session().spec.latent:
        use_absorbed_mla(BACKEND)
        dsa.return_indexer_inputs(model_runner.model)
    with errors_logged():
        return HiSparseAttnBackend(model_runner)


def _replace_triton() -> None:
    """Let SGLang find the last slot of each request, for drafts, with PyTorch's operators."""
    from sglang.srt.mem_cache import allocation

    allocation.get_last_loc_triton = allocation.get_last_loc_torch


def _make_draft_backend(model_runner: Any) -> Any:
    from hisparse.sglang.absorbed_mla import use_absorbed_mla
    from hisparse.sglang.features import dsa
    from hisparse.sglang.features.speculation.draft_backend import DraftAttnBackend

    use_absorbed_mla(DRAFT_BACKEND)
    dsa.skip_indexers(model_runner.model)
    return DraftAttnBackend(model_runner)


def _exit_on_error(check: Callable[[], Any]) -> Any:
    """Call ``check``; on the command line an error of it is one line and exit code 1."""
    try:
        return check()
    except HiSparseError as error:
        if _launched_by_command_line:
            raise SystemExit(f"hisparse: error: {error}") from error
        raise


def _around_prepare_server_args(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global _launched_by_command_line
    _launched_by_command_line = True
    return original(*args, **kwargs)


def _around_resolve_once(original: Callable[..., Any], server_args: Any) -> Any:
    resolved = getattr(server_args, "_resolution_finished", False)
    if resolved or not is_requested(server_args):
        return original(server_args)
    _exit_on_error(_check_release)
    os.environ[_IN_USE] = "1"
    install_hooks()
    _exit_on_error(verify_hooks)

    from hisparse.kernels.build.ahead import build_kernels
    from hisparse.sglang.features.dsa import fake_device_capability
    from hisparse.sglang.server_args import check_after_resolution, prepare_before_resolution

    _exit_on_error(lambda: prepare_before_resolution(server_args))
    with fake_device_capability():
        result = _exit_on_error(lambda: original(server_args))
    _exit_on_error(lambda: check_after_resolution(server_args))
    _exit_on_error(lambda: build_kernels(server_args.device))
    return result


#: Wrappers of the functions that see a server's arguments, by name.
_ARGUMENT_WRAPPERS: dict[str, Callable[..., Any]] = {
    "prepare_server_args": _around_prepare_server_args,
    "resolve_once": _around_resolve_once,
}
_ARGUMENT_HOOKS = tuple(t for t in HOOKS if t.rpartition(".")[2] in _ARGUMENT_WRAPPERS)
