"""Lets models start that SGLang refuses by the name of the attention backend."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from hisparse.sglang.features import hybrids
from hisparse.sglang.requested import BACKEND, is_requested

__all__ = ["around_model_specific_adjustments"]

#: SGLang's checks see this backend in place of hisparse. All of them accept it.
_STAND_IN = "triton"
_FLAGS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def around_model_specific_adjustments(original: Callable[[Any], None], server_args: Any) -> None:
    """Adjust SGLang's arguments to the model, without its checks of the backend's name.

    For some models (gpt-oss, EXAONE-4, Gemma 4, Llama 4) SGLang asserts that the attention backend
    is one of a list, since some of its own backends lack windows or sinks. hisparse judges a model
    by its layers instead.

    Raises:
        ConfigError: a hybrid that hisparse or SGLang does not serve with these flags.
    """
    if not is_requested(server_args):
        return original(server_args)
    from sglang.srt.arg_groups import model_hook

    resolved_view = model_hook.resolved_view
    name = _STAND_IN
    with ExitStack() as stack:
        if hybrids.check_hybrid(server_args):
            name = hybrids.STAND_IN
            stack.enter_context(hybrids.refused_in_one_line(server_args))
        stack.enter_context(
            patch.object(model_hook, "resolved_view", lambda args: _View(resolved_view(args), name))
        )
        return original(server_args)


class _View:
    """SGLang's view of its arguments, with another name in place of hisparse."""

    def __init__(self, view: Any, name: str) -> None:
        self._view, self._name = view, name

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._view, name)
        return self._name if name in _FLAGS and value == BACKEND else value
