"""Sketch: rank pages by attention estimated from about a tenth of the key bytes. Ours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.algorithms.base import BaseSparseAlgorithm, Representation, register_algorithm
from hisparse.algorithms.step import DecodeStep, PrefillStep, SelectionPolicy
from hisparse.kernels import SketchLayout, page_sketch, select, serial_operators, sketch_score
from hisparse.types import KVSpec, Selection

__all__ = ["Sketch"]

_SKETCH = "sketch"


@register_algorithm("sketch")
@dataclass(frozen=True, kw_only=True)
class Sketch(BaseSparseAlgorithm):
    """Keeps the pages with the most attention, as estimated from sketches of their keys.

    A page's share of the softmax is the log-sum-exp of its tokens' logits. The sketch estimates
    it from 8 bits per channel for the page as a whole, and 2 bits per token in the channels that
    vary most within the page. A token differs from its neighbours in few channels, and these
    channels change from page to page. A sketch depends on the page's keys alone, so nothing is
    calibrated. Our own method; docs/sketch.md compares it with what else was tried.

    Attributes:
        detail: in [0, 1]; share of the channels that store bits for each token.
    """

    detail: float = 0.3125

    def __post_init__(self) -> None:
        if not 0 <= self.detail <= 1:
            raise ValueError(f"detail: got {self.detail}, expected 0 to 1")

    def layout(self, kv: KVSpec) -> SketchLayout:
        """Layout of the sketch of one page and KV head."""
        # A page of one token is its own mean.
        count = round(self.detail * kv.head_dim) if kv.page_size > 1 else 0
        return SketchLayout(kv.head_dim, kv.page_size, count)

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        shape = (policy.kv.num_kv_heads, self.layout(policy.kv).num_bytes)
        return {_SKETCH: Representation(shape, torch.uint8)}

    def construct_representations(
        self, keys: Tensor, queries: Tensor, layer_id: int, step: PrefillStep
    ) -> None:
        self._store(keys, layer_id, step.host_pages, step)

    def update_representations(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: DecodeStep
    ) -> None:
        self._store(keys, layer_id, host_pages, step)

    def _store(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: PrefillStep | DecodeStep
    ) -> None:
        sketches = step.representations[_SKETCH][layer_id]
        page_sketch(keys, sketches, host_pages, self.layout(step.policy.kv))

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        with serial_operators(queries.device):
            return self._select(queries.float() * step.policy.scale, layer_id, step)

    def _select(self, query: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        """Select for ``query [B, Hq, D]``, times the softmax scale."""
        policy = step.policy
        scores = sketch_score(
            query,
            step.representations[_SKETCH][layer_id],
            step.host_page_table[:, : step.max_pages],
            step.num_pages,
            self.layout(policy.kv),
        )
        # Heads that share a selection compare their pages with the tail page, always attended.
        shared = policy.heads < policy.kv.num_q_heads
        return select(
            scores,
            step.num_pages,
            policy.rule,
            forced=step.forced_pages,
            rest=step.tail_lse(layer_id, query) if shared else None,
        )
