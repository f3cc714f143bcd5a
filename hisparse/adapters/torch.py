"""The adapter that needs nothing but PyTorch; it uses C++ kernels where a compiler is at hand."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.adapters.base import ADAPTERS, Attended, BackendAdapter
from hisparse.kernels import paged_attention
from hisparse.types import PagedKV, SelectionScope

__all__ = ["TorchAdapter"]

#: Queries at a time where no fused kernel returns the log-sum-exp: bounds the logits in memory.
_QUERY_BLOCK = 512


@ADAPTERS.register("torch")
class TorchAdapter(BackendAdapter):
    """Attends with PyTorch operators for prefill and the project's kernels for decoding."""

    scopes: tuple[SelectionScope, ...] = ("kv_head", "layer", "query_head")

    def attend(
        self, q: Tensor, kv: PagedKV, page_table: Tensor, seq_lens: Tensor, scale: float
    ) -> Attended:
        query = q.float() * scale
        return Attended(*paged_attention(query, kv, page_table, seq_lens))

    def attend_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool
    ) -> Attended:
        # PyTorch's fused kernel wants values as wide as keys.
        if q.device.type == "cpu" and k.shape[-1] == v.shape[-1]:
            return self._fused_cpu(q, k, v, scale, causal)
        return self._blocked(q, k, v, scale, causal)

    @staticmethod
    def _fused_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Attended:
        """The operator behind SDPA on a CPU, called directly because it returns the lse."""
        group = q.shape[1] // k.shape[1]
        queries, keys, values = (
            x.transpose(0, 1)[None]
            for x in (q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1))
        )
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, causal, scale=scale
        )
        return Attended(out[0].transpose(0, 1).float(), lse[0].transpose(0, 1))

    @staticmethod
    def _blocked(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Attended:
        kv_heads = k.shape[1]
        keys, values = k.float().permute(1, 2, 0), v.float().transpose(0, 1)
        position = torch.arange(k.shape[0], device=q.device)
        parts = []
        for start in range(0, q.shape[0], _QUERY_BLOCK):
            block = q[start : start + _QUERY_BLOCK].float()
            queries = block.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
            logits = (queries @ keys[:, None]) * scale
            if causal:
                hidden = position > position[start : start + block.shape[0], None]
                logits.masked_fill_(hidden, -torch.inf)
            lse = logits.logsumexp(-1)
            out = (logits - lse[..., None]).exp_() @ values[:, None]
            parts.append(
                Attended(
                    out.flatten(0, 1).transpose(0, 1).contiguous(),
                    lse.flatten(0, 1).transpose(0, 1),
                )
            )
        return Attended(torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts]))
