"""DeepSeek's latent attention: always in the absorbed form, over the latent that is stored."""

from __future__ import annotations

from typing import Any

from hisparse.sglang.checks import BACKEND

__all__ = ["attend_absorbed"]


def attend_absorbed() -> None:
    """Let SGLang's MLA models hand over absorbed queries and the latent, in prefill as well.

    By default a prompt without a prefix is attended with keys and values per head, which are
    not what the pool stores.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    def absorbed(attention: Any, forward_batch: Any) -> Any:
        return AttnForwardMethod.MLA

    AttentionBackendRegistry.register(BACKEND, absorbed)
