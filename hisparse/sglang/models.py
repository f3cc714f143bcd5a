"""What SGLang's models need to run with an attention backend that SGLang does not know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from hisparse.sglang import features, install
from hisparse.sglang.model_shape import name_of
from hisparse.sglang.names import BACKEND, is_requested

_FLAGS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")


def around_model_specific_adjustments(original: Callable[[Any], None], server_args: Any) -> None:
    """Adjust SGLang's arguments to the model, without its checks of the backend's name.

    For some models (gpt-oss, EXAONE-4, Gemma 4, Llama 4) SGLang asserts that the attention backend
    is one of a list, since some of its own backends lack windows or sinks. hisparse judges a model
    by its layers instead.

    Features that the model needs are on from here.

    Raises:
        ConfigError: hisparse or SGLang does not serve the model with these flags.
    """
    if not is_requested(server_args):
        return original(server_args)
    from sglang.srt.arg_groups.overrides import model_config_of

    model = model_config_of(server_args)
    needed = features.for_model(model, name_of(model))
    features.enable(dict.fromkeys([*features.enabled(), *needed]))
    for feature in needed:
        install.install(feature.hooks)
    with ExitStack() as stack:
        for feature in needed:
            stack.enter_context(feature.adjusting(server_args))
        stack.enter_context(stand_in("triton"))
        return original(server_args)


@contextmanager
def stand_in(backend: str) -> Iterator[None]:
    """Let SGLang's adjustments see another backend, which all their checks accept."""
    from sglang.srt.arg_groups import model_hook

    resolved_view = model_hook.resolved_view
    with patch.object(model_hook, "resolved_view", lambda x: _View(resolved_view(x), backend)):
        yield


class _View:
    """SGLang's view of its arguments, with another name in place of hisparse."""

    def __init__(self, view: Any, name: str) -> None:
        self._view, self._name = view, name

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._view, name)
        return self._name if name in _FLAGS and value == BACKEND else value


def use_absorbed_mla(backend: str) -> None:
    """Make SGLang's MLA models pass absorbed queries and latents to a backend, in prefill too.

    By default SGLang attends a prompt without a prefix with keys and values per head. The pool
    stores only latents.

    Args:
        backend: name of the attention backend.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    def absorbed(attention: Any, forward_batch: Any) -> Any:
        return AttnForwardMethod.MLA

    AttentionBackendRegistry.register(backend, absorbed)
