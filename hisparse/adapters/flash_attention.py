"""FlashAttention 3, from SGLang's kernel package or from its authors' package.

https://arxiv.org/abs/2407.08608. Version 2 (the package ``flash_attn``) is not used: it requires
pages of a multiple of 256 tokens. Written against sglang-kernel 0.4.10; not yet run on a GPU.
"""

from dataclasses import dataclass

from torch import Tensor

from hisparse.adapters.base import ADAPTERS, Attended
from hisparse.adapters.libraries import (
    LibraryAdapter,
    compute_capability_major,
    to_attended,
    token_major,
)
from hisparse.types import AttentionRule, KVSpec, Pages

#: Major compute capabilities that FlashAttention 3 is built for.
_CAPABILITIES = (8, 9)


@dataclass(frozen=True, kw_only=True)
class FlashAttentionCall:
    """Arguments of ``flash_attn_with_kvcache``, by its names."""

    q: Tensor  # ``[R, 1, Q, Dk]``, or ``[R, 1, Q, Dk - Dv]`` with ``qv``; in the pages' dtype
    # ``[R, 1, Q, Dv]`` for MLA, dtype of ``q``: version 3 multiplies ``qv`` by the values, and adds
    # the products to the logits. None for MHA and GQA.
    qv: Tensor | None
    # ``[N, S, Hr, Dk]``, or ``[N, S, 1, Dk - Dv]`` with ``qv``; a view of the pages
    k_cache: Tensor
    v_cache: Tensor  # ``[N, S, Hr, Dv]``, a view of the pages
    page_table: Tensor  # ``[R, P] int32``; entries beyond ``cache_seqlens`` are not read
    cache_seqlens: Tensor  # ``[R] int32``, tokens; may be 0
    softmax_scale: float  # softmax scale
    softcap: float  # cap on logits; 0: none
    # tokens before and after its own position that a query attends; -1: all
    window_size: tuple[int, int]


def make_flash_attention_call(
    q: Tensor, kv: Pages, page_table: Tensor, seq_lens: Tensor, rule: AttentionRule
) -> FlashAttentionCall:
    """Convert :meth:`BackendAdapter.attend`'s arguments, without a copy of keys or tables.

    Each row becomes one sequence. With one row per head (Hr = 1), a sequence has one KV head.

    Args:
        q, kv, page_table, seq_lens, rule: shapes and dtypes as for ``attend``.
    """
    query = q.to(kv.k.dtype)[:, None]
    k, v = token_major(kv.k), token_major(kv.v)
    rank, values = v.shape[-1], None
    if kv.k.data_ptr() == kv.v.data_ptr() and rank < k.shape[-1]:
        query, values, k = query[..., rank:], query[..., :rank], k[..., rank:]
    return FlashAttentionCall(
        q=query,
        qv=values,
        k_cache=k,
        v_cache=v,
        page_table=page_table,
        cache_seqlens=seq_lens,
        softmax_scale=rule.scale,
        softcap=rule.logit_cap,
        window_size=(rule.window - 1, 0) if rule.window else (-1, -1),
    )


@ADAPTERS.register("flash_attention")
class FlashAttentionAdapter(LibraryAdapter):
    """Decodes and prefills with FlashAttention 3, which returns a natural lse."""

    name = "flash_attention"
    functions = ("flash_attn_with_kvcache",)
    modules = ("sgl_kernel.flash_attn", "flash_attn_interface")

    @classmethod
    def missing(cls) -> str | None:
        reason, major = super().missing(), compute_capability_major()
        if reason is None and major not in _CAPABILITIES:
            return f"compute capability is {major}.x, not 8.x, 9.x"
        return reason

    @classmethod
    def widths_refused(cls, kv: KVSpec) -> str | None:
        k, v = kv.head_dim, kv.v_head_dim
        if kv.attention == "MLA":
            fits = 0 < k - v <= 64 and 256 <= v <= 512 and compute_capability_major() == 9
            return None if fits else "256 to 512 values and at most 64 more columns, on sm_90"
        return None if k == v <= 256 and k % 8 == 0 else "keys as wide as values, 8 to 256 by 8"

    def attend(
        self, q: Tensor, kv: Pages, page_table: Tensor, seq_lens: Tensor, rule: AttentionRule
    ) -> Attended:
        call = make_flash_attention_call(q, kv, page_table, seq_lens, rule)
        out, lse, *_ = self._functions[0](**vars(call), return_softmax_lse=True)
        return to_attended(out[:, 0], lse[..., 0], seq_lens)

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, causal: bool, left: int
    ) -> Attended:
        # As many tokens after a query's own as there are queries hide none.
        right = 0 if causal else len(q)
        options = {
            "softmax_scale": rule.scale,
            "causal": causal,
            "softcap": rule.logit_cap,
            "window_size": (left, right) if rule.window else (-1, -1),
            "return_softmax_lse": True,
        }
        out, lse, *_ = self._functions[0](q[None], k[None], v[None], **options)
        return Attended(out[0], lse[0].transpose(0, 1))
