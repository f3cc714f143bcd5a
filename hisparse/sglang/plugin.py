"""Registers the attention backend, and installs the hooks of a server that uses hisparse.

SGLang loads this module in each process of each server, whether the server uses hisparse or not.
Without hisparse, two hooks are installed, which see the server's arguments. The other hooks, and
all imports that take time, wait until the arguments ask for hisparse.
"""

import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from hisparse.errors import HiSparseError, PluginError
from hisparse.sglang import features, install
from hisparse.sglang.install import BACKEND, RELEASE, is_requested, is_supported

_launched_by_command_line = False


def register() -> None:
    """Register the backend and hooks: those on server arguments, or all that the server needs.

    SGLang only logs exceptions of a plugin. If the command line asks for hisparse, a failure
    therefore ends the process: the server would otherwise run without hisparse.
    """
    try:
        _register()
    except Exception as error:
        if BACKEND in sys.argv:
            line = _wrong_release() or install.does_not_fit(str(error))
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


def _register() -> None:
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
    )
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(_make_backend)
    install.register(ARGUMENT_HOOKS)
    if os.environ.get(features.IN_USE):
        install.register(hooks_in_use())
        for feature in features.enabled():
            feature.register()


def hooks_in_use() -> dict[str, Callable[..., Any]]:
    """The hooks of this process's server: those of every server, and those of its features."""
    from hisparse.sglang.hooks import HOOKS

    found = ARGUMENT_HOOKS | HOOKS
    for feature in features.enabled():
        found |= feature.hooks
    return found


def install_hooks() -> None:
    """Install the hooks of this process's server, after :func:`register`.

    Raises:
        PluginError: one is not in place.
    """
    install.install(hooks_in_use())
    for feature in features.enabled():
        feature.register()


def _make_backend(model_runner: Any) -> Any:
    install.verify(hooks_in_use())
    from hisparse.sglang.backend import HiSparseAttnBackend
    from hisparse.sglang.models import use_absorbed_mla
    from hisparse.sglang.session import errors_logged, require_session

    if require_session().setup.spec.attention == "MLA":
        use_absorbed_mla(BACKEND)
    with errors_logged():
        return HiSparseAttnBackend(model_runner)


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

    from hisparse.kernels.build.ahead import build_kernels
    from hisparse.sglang.server_args import check_after_resolution, prepare_before_resolution

    config = _exit_on_error(lambda: prepare_before_resolution(server_args))
    _exit_on_error(install_hooks)
    result = _exit_on_error(lambda: original(server_args))
    _exit_on_error(lambda: check_after_resolution(server_args, config))
    _exit_on_error(lambda: build_kernels(server_args.device))
    return result


#: Hooks on the functions that see a server's arguments.
ARGUMENT_HOOKS: dict[str, Callable[..., Any]] = {
    "sglang.srt.server_args.prepare_server_args": _around_prepare_server_args,
    "sglang.srt.server_args.ServerArgs.resolve_once": _around_resolve_once,
}
