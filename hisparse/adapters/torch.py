"""The adapter that needs only PyTorch. Decode uses a compiled kernel if one is available."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.adapters.base import ADAPTERS, Attended, BackendAdapter
from hisparse.adapters.masked_attention import attend_masked
from hisparse.kernels import paged_attention
from hisparse.types import PagedKV, SelectionScope, StoredKV

__all__ = ["TorchAdapter"]


@ADAPTERS.register("torch")
class TorchAdapter(BackendAdapter):
    """Prefills with PyTorch operators and decodes with the project's kernels."""

    fp8 = True
    scopes: tuple[SelectionScope, ...] = ("kv_head", "layer", "query_head")

    def attend(
        self, q: Tensor, kv: PagedKV, page_table: Tensor, seq_lens: Tensor, scale: float
    ) -> Attended:
        query = q.float() * scale
        return Attended(*paged_attention(query, kv, page_table, seq_lens))

    def attend_fp8(
        self, q: Tensor, kv: StoredKV, page_table: Tensor, seq_lens: Tensor, scale: float
    ) -> Attended:
        query = q.float() * scale
        return Attended(*paged_attention(query, kv, page_table, seq_lens))

    def attend_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool
    ) -> Attended:
        # PyTorch's fused kernel requires values as wide as keys.
        if q.device.type == "cpu" and k.shape[-1] == v.shape[-1]:
            return self._fused_cpu(q, k, v, scale, causal)
        return self._blocked(q, k, v, scale, causal)

    @staticmethod
    def _blocked(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Attended:
        position = torch.arange(k.shape[0], device=q.device)

        def hidden(queries: slice) -> Tensor | None:
            return position > position[queries, None] if causal else None

        return Attended(*attend_masked(q, k, v, scale, hidden))

    @staticmethod
    def _fused_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Attended:
        """Call the operator behind SDPA on a CPU, which returns the lse; SDPA itself does not."""
        group = q.shape[1] // k.shape[1]
        queries, keys, values = (
            x.transpose(0, 1)[None]
            for x in (q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1))
        )
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, causal, scale=scale
        )
        return Attended(out[0].transpose(0, 1).float(), lse[0].transpose(0, 1))
