"""Lets models start that SGLang refuses by the name of the attention backend."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

from hisparse.sglang import hybrids
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
        ConfigError: a hybrid that hisparse or SGLang does not serve with these flags.
    """
    if not is_requested(server_args):
        return original(server_args)
    names = inspect.unwrap(original).__globals__
    resolved_view = names.get("resolved_view")
    name = _STAND_IN
    with ExitStack() as stack:
        if hybrids.check_hybrid(server_args):
            name = hybrids.STAND_IN
            stack.enter_context(hybrids.refused_in_one_line(server_args))
        if resolved_view is not None:
            view = partial(_View, name=name)
            stack.enter_context(
                patch.dict(names, resolved_view=lambda args: view(resolved_view(args)))
            )
        return original(server_args)


class _View:
    """SGLang's view of its arguments, with another name in place of hisparse."""

    def __init__(self, view: Any, name: str) -> None:
        self._view, self._name = view, name

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._view, name)
        return self._name if name in _FLAGS and value == BACKEND else value
