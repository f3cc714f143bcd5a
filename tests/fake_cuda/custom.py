"""An algorithm as users write it: ``summarize`` and ``score``, and nothing of the engine."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hisparse.algorithms import PageScoreAlgorithm
from hisparse.types import KVSpec

__all__ = ["Custom"]


@dataclass(frozen=True, kw_only=True)
class Custom(PageScoreAlgorithm):
    """Keeps the pages whose smallest key is largest."""

    def summary_shape(self, kv: KVSpec) -> tuple[int, ...]:
        return (kv.num_kv_heads,)

    def summarize(self, keys: Tensor, mask: Tensor) -> Tensor:
        return keys.norm(dim=-1).amin(dim=1)

    def score(self, query: Tensor, summaries: Tensor) -> Tensor:
        return summaries.transpose(1, 2)
