"""StreamingLLM: attention sinks and a window. https://arxiv.org/abs/2309.17453"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hisparse.algorithms.base import Representation, register_algorithm
from hisparse.algorithms.page_score import RankedPagesAlgorithm
from hisparse.algorithms.step import DecodeStep, SelectionPolicy


@register_algorithm("streaming")
@dataclass(frozen=True, kw_only=True)
class Streaming(RankedPagesAlgorithm):
    """Keeps the first pages and the most recent ones, whatever the query. A baseline."""

    captured_launches: ClassVar[int] = 6

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        return {}

    def store(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, stored: Mapping[str, Tensor]
    ) -> None:
        """Keeps no representations."""

    def score_pages(self, query: Tensor, layer_id: int, step: DecodeStep) -> Tensor:
        """A page's score is its number: the later, the higher."""
        width, device = step.max_pages, query.device
        page = step.once("page", lambda: torch.arange(width, dtype=torch.float32, device=device))
        return page.expand(len(query), 1, -1)
