"""DeepSeek's latent attention (MLA) in its absorbed form, which attends over stored latents."""

from __future__ import annotations

from typing import Any

from hisparse.sglang.requested import BACKEND

__all__ = ["use_absorbed_mla"]


def use_absorbed_mla() -> None:
    """Make SGLang's MLA models pass absorbed queries and latents to the backend, in prefill too.

    By default SGLang attends a prompt without a prefix with keys and values per head. The pool
    stores only latents.
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
