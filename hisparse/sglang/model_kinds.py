"""Which kinds of models start: SGLang's checks by name of a backend, and hybrids."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from hisparse.errors import ConfigError
from hisparse.sglang import compat
from hisparse.sglang.requested import BACKEND, is_requested

__all__ = ["around_model_specific_adjustments"]

#: SGLang's checks see this backend in place of hisparse. All of them accept it.
_STAND_IN = "triton"
_FLAGS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def around_model_specific_adjustments(original: Callable[[Any], None], server_args: Any) -> None:
    """Adjust SGLang's arguments to the model, without its checks of the backend's name.

    For some models (gpt-oss, EXAONE-4, Gemma 4, Llama 4) SGLang asserts that the attention backend
    is one of a list, since some of its own backends lack windows or sinks. hisparse judges a model
    by its layers instead. In releases before 0.5.19 these checks stay.

    Raises:
        ConfigError: the model has layers without attention.
    """
    if not is_requested(server_args):
        return original(server_args)
    _check_layers(server_args)
    names = inspect.unwrap(original).__globals__
    resolved_view = names.get("resolved_view")
    if resolved_view is None:
        return original(server_args)
    with patch.dict(names, resolved_view=lambda args: _View(resolved_view(args))):
        return original(server_args)


class _View:
    """SGLang's view of its arguments, with another name in place of hisparse."""

    def __init__(self, view: Any) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._view, name)
        return _STAND_IN if name in _FLAGS and value == BACKEND else value


def _check_layers(server_args: Any) -> None:
    """Reject hybrids. SGLang rejects some of their settings with a traceback, so this is first."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    model = compat.model_config_of(server_args)
    if mambaish_config(model) is not None:
        name = ", ".join(model.hf_config.architectures or ["this model"])
        raise ConfigError(
            f"{name} has layers of linear attention, convolution or a state space model (Mamba); "
            "expected attention in every layer"
        )
