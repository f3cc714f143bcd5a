"""Registers the attention backend and the hooks, and checks that each hook took."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from hisparse.errors import HiSparseError, PluginError
from hisparse.sglang import checks, compat, dsa, hooks
from hisparse.sglang.names import HOOKS
from hisparse.sglang.session import session

__all__ = ["hooked", "register", "verify_hooks"]

BACKEND = checks.BACKEND

_originals: dict[str, object] = {}
_launched_by_command_line = False


def register() -> None:
    """Register everything; what is missing in this SGLang is reported by :func:`verify_hooks`.

    SGLang only logs what a plugin raises. So if hisparse is what the command line asks for, a
    failure ends the process here instead of leaving a server without it.
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
    """What a dotted name stands for now, None if it is gone."""
    try:
        found: object = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return None
    # A class method is a new bound object at each look: the function behind it is what stays.
    return getattr(found, "__func__", found)


def hooked() -> list[tuple[str, Any, Callable[..., Any]]]:
    """Targets that exist, with what was there before and what wraps it."""
    triples = ((t, _originals.get(t), _WRAPPERS[t.rpartition(".")[2]]) for t in HOOKS)
    return [(target, before, wrapper) for target, before, wrapper in triples if before is not None]


def verify_hooks() -> None:
    """Raise ``PluginError`` with the name of a hook that is not in place."""
    for target in HOOKS:
        now = _resolve(target)
        if now is None:
            raise PluginError(_does_not_fit(f"{target} is gone"))
        if now is _originals.get(target):
            raise PluginError(_does_not_fit(f"the hook on {target} did not take"))


def _make_backend(model_runner: Any) -> Any:
    verify_hooks()
    compat.allocate_on(model_runner.device)
    from hisparse.sglang.backend import HiSparseAttnBackend
    from hisparse.sglang.mla import attend_absorbed

    if session().spec.latent:
        attend_absorbed()
        dsa.hand_over_inputs(model_runner.model)
    return HiSparseAttnBackend(model_runner)


def _or_exit(check: Callable[[], None]) -> None:
    """On the command line a refusal is one line on standard error and exit code 1."""
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
    if checks.is_requested(server_args) and not compat.is_resolved(server_args):
        _or_exit(verify_hooks)
        _or_exit(lambda: checks.before_resolution(server_args))
        with dsa.device_capability():
            result = original(server_args)
        _or_exit(lambda: checks.after_resolution(server_args))
        return result
    return original(server_args)


#: By the last part of a hook's name.
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
    "_dsa_kv_cache_dtype_default": dsa.around_kv_cache_dtype_default,
    "_compute_cell_size": dsa.around_compute_cell_size,
    "_compute_dsa_indexer_cell_size": dsa.around_compute_indexer_cell_size,
}
