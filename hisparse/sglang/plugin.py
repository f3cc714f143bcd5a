"""Registers the attention backend and the hooks, and verifies that each hook is installed."""

from __future__ import annotations

import logging
import pkgutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from hisparse.errors import HiSparseError, PluginError
from hisparse.kernels.build.ahead import build_kernels
from hisparse.sglang import compat, dsa_indexer, hooks
from hisparse.sglang.names import HOOKS
from hisparse.sglang.server_args import (
    BACKEND,
    check_after_resolution,
    is_requested,
    prepare_before_resolution,
)
from hisparse.sglang.session import require_session

__all__ = ["installed_hooks", "register", "verify_hooks"]

logger = logging.getLogger("hisparse")

#: SGLang's functions before the hooks wrapped them, by dotted name.
_originals: dict[str, object] = {}
_launched_by_command_line = False


def register() -> None:
    """Register the backend and all hooks. :func:`verify_hooks` reports names that do not exist.

    SGLang only logs exceptions of a plugin. If the command line asks for hisparse, a failure
    therefore ends the process: the server would otherwise run without hisparse.
    """
    try:
        _register()
    except Exception as error:
        if BACKEND in sys.argv:
            raise SystemExit(f"hisparse: error: {_does_not_fit(str(error))}") from error
        raise


def _does_not_fit(what: str) -> str:
    return f"hisparse does not fit sglang {version('sglang')}: {what}"


def _register() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    known, add = compat.backend_choices()
    if BACKEND not in known:
        add([BACKEND])
    register_attention_backend(BACKEND)(_make_backend)
    for target in HOOKS:
        _originals[target] = _resolve(target)
        HookRegistry.register(target, _WRAPPERS[target.rpartition(".")[2]], HookType.AROUND)


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
    triples = ((t, _originals.get(t), _WRAPPERS[t.rpartition(".")[2]]) for t in HOOKS)
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
    compat.enable_page_allocator(model_runner.device)
    from hisparse.sglang.absorbed_mla import use_absorbed_mla
    from hisparse.sglang.backend import HiSparseAttnBackend

    if require_session().spec.latent:
        use_absorbed_mla()
        dsa_indexer.return_indexer_inputs(model_runner.model)
    try:
        return HiSparseAttnBackend(model_runner)
    except HiSparseError as error:
        logger.error("hisparse: error: %s", error)
        raise


def _exit_on_error(check: Callable[[], None]) -> None:
    """Run ``check``; on the command line an error is one line on standard error and exit code 1."""
    try:
        check()
    except HiSparseError as error:
        if _launched_by_command_line:
            raise SystemExit(f"hisparse: error: {error}") from error
        raise


def _around_prepare_server_args(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global _launched_by_command_line
    _launched_by_command_line = True
    return original(*args, **kwargs)


def _around_resolve_once(original: Callable[..., Any], server_args: Any) -> Any:
    if is_requested(server_args) and not compat.is_resolved(server_args):
        _exit_on_error(verify_hooks)
        _exit_on_error(lambda: prepare_before_resolution(server_args))
        with dsa_indexer.fake_device_capability():
            result = original(server_args)
        _exit_on_error(lambda: check_after_resolution(server_args))
        _exit_on_error(lambda: build_kernels(server_args.device))
        return result
    return original(server_args)


#: Wrappers by the last part of the hooked name.
_WRAPPERS: dict[str, Callable[..., Any]] = {
    "prepare_server_args": _around_prepare_server_args,
    "resolve_once": _around_resolve_once,
    "__post_init__": _around_resolve_once,
    "_profile_available_bytes": hooks.around_profile_available_bytes,
    "resolve_max_num_reqs": hooks.around_resolve_max_num_reqs,
    "get_kv_pool_cls": hooks.around_get_kv_pool_cls,
    "_build_token_to_kv_pool": hooks.around_build_token_to_kv_pool,
    "free_rows": hooks.around_free_rows,
    "free": hooks.around_free,
    "flush_cache": hooks.around_flush_cache,
    "enable_fused_set_kv_buffer": hooks.around_enable_fused_set_kv_buffer,
    "init_new": hooks.around_init_new,
    "_compute_max_prefix_len": hooks.around_compute_max_prefix_len,
    "_dsa_kv_cache_dtype_default": dsa_indexer.around_kv_cache_dtype_default,
    "_compute_cell_size": dsa_indexer.around_compute_cell_size,
    "_compute_dsa_indexer_cell_size": dsa_indexer.around_compute_indexer_cell_size,
}
