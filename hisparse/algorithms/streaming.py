"""StreamingLLM: attention sinks and a window. https://arxiv.org/abs/2309.17453"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.algorithms.base import (
    BaseSparseAlgorithm,
    Representation,
    register_algorithm,
)
from hisparse.algorithms.step import DecodeStep, PrefillStep, SelectionPolicy
from hisparse.types import Selection

__all__ = ["Streaming"]


@register_algorithm("streaming")
@dataclass(frozen=True, kw_only=True)
class Streaming(BaseSparseAlgorithm):
    """Keeps the first pages and the most recent ones, whatever the query. A baseline."""

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        return {}

    def construct_representations(
        self, keys: Tensor, queries: Tensor, layer_id: int, step: PrefillStep
    ) -> None:
        """Keeps no representations."""

    def update_representations(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: DecodeStep
    ) -> None:
        """Keeps no representations."""

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        """Select the sinks and the last pages, or all pages if they fit."""
        policy, count = step.policy, step.num_pages[:, None]
        width = max(1, min(policy.max_pages, step.max_pages))
        entry = torch.arange(width, dtype=torch.int32, device=count.device)
        sinks = min(policy.num_sink_pages, width)
        # After the sinks come the last `width - sinks` pages, or fewer in a short context.
        skipped = torch.where(entry >= sinks, (count - width).clamp(min=0), 0)
        pages = torch.where(entry < count, entry + skipped, -1).int()
        lengths = count.clamp(max=width)
        return Selection(
            pages[:, None].expand(-1, policy.heads, -1), lengths.expand(-1, policy.heads)
        )
