"""KNorm: keys with a small norm draw attention. https://arxiv.org/abs/2406.11430 (per page)"""

from dataclasses import dataclass

from torch import Tensor

from hisparse.algorithms import KVSpec, PageScoreAlgorithm, register_algorithm


@register_algorithm("knorm")
@dataclass(frozen=True, kw_only=True)
class KNorm(PageScoreAlgorithm):
    """Keeps the pages that hold the smallest keys, whatever the query."""

    def summary_shape(self, kv: KVSpec) -> tuple[int, ...]:
        return (kv.num_kv_heads,)

    def summarize(self, keys: Tensor, mask: Tensor) -> Tensor:
        """``keys [P, S, Hkv, D]``, ``mask [P, S]`` -> ``[P, Hkv]``, the smallest norm."""
        return keys.norm(dim=-1).masked_fill(~mask[..., None], float("inf")).amin(dim=1)

    def score(self, query: Tensor, summaries: Tensor) -> Tensor:
        """``query [B, Hq, D]``, ``summaries [B, P, Hkv]`` -> ``[B, Hkv, P]``; higher is kept."""
        return -summaries.transpose(1, 2)
