"""Quest: bound a page's logits by its channel-wise key range. https://arxiv.org/abs/2406.10774"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.algorithms.base import Representation, register_algorithm
from hisparse.algorithms.page_score import PageScoreAlgorithm
from hisparse.batch import DecodeStep, SelectionPolicy
from hisparse.kernels import page_score, page_summary
from hisparse.types import KVSpec

__all__ = ["Quest"]


@register_algorithm("quest")
@dataclass(frozen=True, kw_only=True)
class Quest(PageScoreAlgorithm):
    """Keeps the pages whose largest possible q.k is highest (section 3.3 of the paper).

    Ranges are kept in bfloat16, rounded outward where keys are wider: still a bound, in half the
    bytes.
    """

    def summary_shape(self, kv: KVSpec) -> tuple[int, ...]:
        return (kv.num_kv_heads, 2 * kv.head_dim)

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        return {"summary": Representation(self.summary_shape(policy.kv), torch.bfloat16)}

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

    def store(self, keys: Tensor, summaries: Tensor, host_pages: Tensor) -> None:
        """:meth:`summarize` by a kernel that writes the summaries where they lie."""
        page_summary(keys, summaries, host_pages)

    def score_pages(self, query: Tensor, summaries: Tensor, step: DecodeStep) -> Tensor:
        """:meth:`score` by a kernel that reads the summaries where they lie."""
        table = step.host_page_table[:, : step.max_pages]
        return page_score(query.float(), summaries, table, step.num_pages)
