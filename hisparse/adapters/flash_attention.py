"""FlashAttention 3, as SGLang ships it or as the package of its authors.

Version 2 (the package ``flash_attn``) is left out: its pages are multiples of 256 tokens.
https://arxiv.org/abs/2407.08608. Written against sglang-kernel 0.4.10; not yet run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.adapters.base import ADAPTERS, Attended
from hisparse.adapters.libraries import compute_capability_major, import_function, to_attended, token_major
from hisparse.adapters.torch import TorchAdapter
from hisparse.errors import ConfigError
from hisparse.types import KVSpec, PagedKV, SelectionScope

__all__ = ["FlashAttentionAdapter", "FlashAttentionCall", "make_flash_attention_call"]

_MODULES = ("sgl_kernel.flash_attn", "flash_attn_interface")
#: Compute capabilities, major, that version 3 is built for.
_ARCHITECTURES = (8, 9)


@dataclass(frozen=True, kw_only=True)
class FlashAttentionCall:
    """Arguments of ``flash_attn_with_kvcache``, by its names.

    Attributes:
        q: ``[R, 1, Q, Dk]``, or ``[R, 1, Q, Dk - Dv]`` with ``qv``; the pages' dtype.
        qv: ``[R, 1, Q, Dv]``, what is multiplied by the values as if they were keys too: how
            version 3 attends over MLA's latent. None: nothing is.
        k_cache: ``[N, S, Hr, Dk]``, or ``[N, S, 1, Dk - Dv]`` with ``qv``; a view of the pages.
        v_cache: ``[N, S, Hr, Dv]``, a view of the pages.
        page_table: ``[R, P] int32``; not read beyond ``cache_seqlens``.
        cache_seqlens: ``[R] int32``, tokens; may be 0.
        softmax_scale: softmax scale.
    """

    q: Tensor
    qv: Tensor | None
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    cache_seqlens: Tensor
    softmax_scale: float


def make_flash_attention_call(
    q: Tensor, kv: PagedKV, page_table: Tensor, seq_lens: Tensor, scale: float
) -> FlashAttentionCall:
    """The call for :meth:`BackendAdapter.attend`'s arguments; copies no keys and no tables.

    A row is a sequence: with a device page per head (Hr = 1) they have one KV head each.
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
        softmax_scale=scale,
    )


@ADAPTERS.register("flash_attention")
class FlashAttentionAdapter(TorchAdapter):
    """Decodes with FlashAttention 3; returns its lse, which is natural."""

    fp8 = False
    scopes: tuple[SelectionScope, ...] = ("kv_head", "layer", "query_head")
    device_types = ("cuda",)
    dtypes = (torch.bfloat16, torch.float16)

    def __init__(self) -> None:
        found = import_function("flash_attn_with_kvcache", *_MODULES)
        if isinstance(found, str):
            raise ConfigError(f"adapter 'flash_attention': {found}")
        self._attend = found

    @classmethod
    def missing(cls) -> str | None:
        found = import_function("flash_attn_with_kvcache", *_MODULES)
        if isinstance(found, str):
            return found
        major = compute_capability_major()
        return None if major in _ARCHITECTURES else f"compute capability is {major}.x, not 8.x, 9.x"

    @classmethod
    def widths_refused(cls, kv: KVSpec) -> str | None:
        k, v = kv.head_dim, kv.v_head_dim
        if kv.latent:
            fits = 0 < k - v <= 64 and 256 <= v <= 512 and compute_capability_major() == 9
            return None if fits else "256 to 512 values and at most 64 more columns, on sm_90"
        return None if k == v <= 256 and k % 8 == 0 else "keys as wide as values, 8 to 256 by 8"

    def attend(
        self, q: Tensor, kv: PagedKV, page_table: Tensor, seq_lens: Tensor, scale: float
    ) -> Attended:
        call = make_flash_attention_call(q, kv, page_table, seq_lens, scale)
        out, lse, *_ = self._attend(**vars(call), return_softmax_lse=True)
        return to_attended(out[:, 0], lse[..., 0], seq_lens)

    def attend_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool
    ) -> Attended:
        if k.shape[-1] != v.shape[-1]:
            return super().attend_prefill(q, k, v, scale, causal=causal)
        tensors = (q.to(k.dtype)[None], k[None], v[None])
        options = {"softmax_scale": scale, "causal": causal, "return_softmax_lse": True}
        out, lse, *_ = self._attend(*tensors, **options)
        return Attended(out[0].float(), lse[0].transpose(0, 1))
