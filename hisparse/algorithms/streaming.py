"""StreamingLLM: attention sinks and a window. https://arxiv.org/abs/2309.17453"""

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

    def score_pages(self, query: Tensor, layer_id: int, step: DecodeStep) -> Tensor:
        """``query [B, Hq, D]``, any dtype -> ``[B, 1, P] float32``; higher is kept.

        A page's score is its number.
        """
        width, device = step.max_pages, query.device
        page = step.once("page", lambda: torch.arange(width, dtype=torch.float32, device=device))
        return step.once("scores", lambda: page.repeat(len(query), 1, 1))
