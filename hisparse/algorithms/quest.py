"""Quest: bound a page's logits by its channel-wise key range. https://arxiv.org/abs/2406.10774"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hisparse.algorithms.base import Representation, register_algorithm
from hisparse.algorithms.page_score import PageScoreAlgorithm
from hisparse.batch import DecodeStep, SelectionPolicy
from hisparse.kernels import page_score, page_summary, round_outward
from hisparse.types import KVSpec

__all__ = ["Quest"]

_FP8_MAX = 448.0


@register_algorithm("quest")
@dataclass(frozen=True, kw_only=True)
class Quest(PageScoreAlgorithm):
    """Keeps the pages whose largest possible q.k is highest (section 3.3 of the paper).

    Attributes:
        summary_dtype: of the ranges. Narrow types are rounded outward, so that the bound stays
            one; float8_e4m3fn has a power of two as scale for each page and head (on GPUs from
            compute capability 8.9 on).
    """

    summary_dtype: Literal["bfloat16", "float32", "float8_e4m3fn"] = "bfloat16"

    @property
    def _scaled(self) -> bool:
        return self.summary_dtype == "float8_e4m3fn"

    def summary_shape(self, kv: KVSpec) -> tuple[int, ...]:
        return (kv.num_kv_heads, 2 * kv.head_dim)

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        dtype: torch.dtype = getattr(torch, self.summary_dtype)
        found = {"summary": Representation(self.summary_shape(policy.kv), dtype)}
        if self._scaled:
            found["scale"] = Representation((policy.kv.num_kv_heads,), torch.float32)
        return found

    def summarize(self, keys: Tensor, mask: Tensor) -> Tensor:
        """``keys [P, S, Hkv, D]``, ``mask [P, S]`` -> ``[P, Hkv, 2D]``: maxima, then minima."""
        empty = ~mask[..., None, None]
        high = keys.masked_fill(empty, -torch.inf).amax(dim=1)
        low = keys.masked_fill(empty, torch.inf).amin(dim=1)
        return torch.cat([high, low], dim=-1)

    def score(self, query: Tensor, summaries: Tensor) -> Tensor:
        """``query [B, Hq, D]``, ``summaries [B, P, Hkv, 2D]`` -> ``[B, Hq, P]``.

        sum_d max(q_d * high_d, q_d * low_d), as one product: the positive part of q meets the
        maxima, the negative part the minima.
        """
        kv_heads = summaries.shape[2]
        signed = torch.cat([query.clamp(min=0), query.clamp(max=0)], dim=-1)
        signed = signed.unflatten(1, (kv_heads, -1))
        ranges = summaries.permute(0, 2, 3, 1).to(signed.dtype)
        scores: Tensor = (signed @ ranges).flatten(1, 2)
        return scores

    def store(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, stored: Mapping[str, Tensor]
    ) -> None:
        """:meth:`summarize` by a kernel that writes the summaries where they lie."""
        summaries = stored["summary"][layer_id]
        if not self._scaled:
            page_summary(keys, summaries, host_pages)
            return
        high, low = keys.float().amax(1), keys.float().amin(1)
        largest = torch.maximum(high.abs(), low.abs()).amax(-1, keepdim=True)
        # A power of two changes no digit of what it scales.
        scale = torch.exp2((largest / _FP8_MAX).log2().ceil().clamp(-100, 100))
        high = round_outward(high / scale, summaries.dtype, up=True)
        low = round_outward(low / scale, summaries.dtype, up=False)
        summaries[host_pages.long()] = torch.cat([high, low], -1)
        stored["scale"][layer_id, host_pages.long()] = scale[..., 0]

    def score_pages(self, query: Tensor, layer_id: int, step: DecodeStep) -> Tensor:
        """:meth:`score` by a kernel that reads the summaries where they lie."""
        table = step.host_page_table[:, : step.max_pages]
        summaries = step.representations["summary"][layer_id]
        scores = page_score(query.float(), summaries, table, step.num_pages)
        if not self._scaled:
            return scores
        scale = step.representations["scale"][layer_id, table.long()].transpose(1, 2)
        return scores * scale.repeat_interleave(query.shape[1] // scale.shape[1], dim=1)
