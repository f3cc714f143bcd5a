"""DeepSeek's latent attention (MLA) in its absorbed form, which attends over stored latents."""

from __future__ import annotations

from typing import Any

__all__ = ["use_absorbed_mla"]


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
