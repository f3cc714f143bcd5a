"""Registers the attention backend and the hooks, and checks that each hook took."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from hisparse.errors import HiSparseError, PluginError
from hisparse.sglang import checks, dsa, runtime
from hisparse.sglang.names import HOOKS

__all__ = ["register", "verify_hooks"]

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
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
    )
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(_make_backend)
    wrappers: dict[str, Callable[..., Any]] = dict(
        zip(
            HOOKS,
            (
                _around_prepare_server_args,
                _around_resolve_once,
                runtime.around_profile_available_bytes,
                runtime.around_resolve_max_num_reqs,
                runtime.around_get_kv_pool_cls,
                runtime.around_free_rows,
                runtime.around_flush_cache,
                runtime.around_enable_fused_set_kv_buffer,
                runtime.around_init_new,
                runtime.around_compute_max_prefix_len,
                dsa.around_kv_cache_dtype_default,
                dsa.around_compute_indexer_cell_size,
            ),
            strict=True,
        )
    )
    for target, wrapper in wrappers.items():
        _originals[target] = _resolve(target)
        HookRegistry.register(target, wrapper, HookType.AROUND)


def _resolve(target: str) -> object:
    """What a dotted name stands for now, None if it is gone."""
    try:
        found: object = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return None
    # A class method is a new bound object at each look: the function behind it is what stays.
    return getattr(found, "__func__", found)


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
    from hisparse.sglang.backend import HiSparseAttnBackend
    from hisparse.sglang.mla import attend_absorbed

    if runtime.session().spec.latent:
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
    if checks.is_requested(server_args) and not getattr(server_args, "_resolution_finished", False):
        _or_exit(verify_hooks)
        _or_exit(lambda: checks.before_resolution(server_args))
        with dsa.device_capability():
            result = original(server_args)
        _or_exit(lambda: checks.after_resolution(server_args))
        return result
    return original(server_args)
