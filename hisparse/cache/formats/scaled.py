"""Keys and values in eight bits, each vector with a power of two as scale."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hisparse.adapters import Attended, BackendAdapter
from hisparse.cache.formats.base import KVFormat
from hisparse.kernels import dequantize, quantize
from hisparse.types import AttentionRule, PagedKV, StoredKV


class ScaledFormat(KVFormat):
    """One scale for each token's key and value of a head. Kernels multiply by it as they attend.

    A subclass states the dtype, which :func:`hisparse.kernels.quantize` and
    :func:`hisparse.kernels.paged_attention` have to take.
    """

    num_scales: ClassVar[int] = 2

    @property
    def name(self) -> str:
        return self.kv.kv_cache_dtype

    @property
    def dense_token_bytes(self) -> int:
        if self.sglang_dtype is None:
            return super().dense_token_bytes
        # SGLang stores no scales.
        return self.token_bytes - self.num_scales * self.kv.num_kv_heads * self.kv.num_layers

    def encode(self, k: Tensor, v: Tensor) -> StoredKV:
        return quantize(k, v, self.dtype)

    def decode(self, stored: StoredKV, out: PagedKV | None = None) -> PagedKV:
        if out is None:
            k, v = (torch.empty(x.shape, dtype=self.kv.dtype, device=x.device) for x in stored.kv)
            out = PagedKV(k, v)
        dequantize(stored, out)
        return out

    def attend(
        self,
        adapter: BackendAdapter,
        q: Tensor,
        stored: StoredKV,
        page_table: Tensor,
        seq_lens: Tensor,
        rule: AttentionRule,
        max_pages: int,
    ) -> Attended:
        return adapter.attend_scaled(q, stored, page_table, seq_lens, rule)
