"""Sketch: rank pages by attention estimated from about a tenth of the key bytes. Ours."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hisparse.algorithms.base import BaseSparseAlgorithm, Representation, register_algorithm
from hisparse.algorithms.step import DecodeStep, PrefillStep, SelectionPolicy
from hisparse.kernels import (
    SketchLayout,
    TailPages,
    outline_bytes,
    outline_score,
    page_outline,
    page_sketch,
    scores_new_tokens,
    select,
    serial_operators,
    sketch_score,
)
from hisparse.types import KVSpec, Selection

_SKETCH, _OUTLINE = "sketch", "outline"
#: Divides the logits by which heads vote on candidates. A flatter softmax counts more heads' peaks.
_TEMPERATURE = 4.0


@register_algorithm("sketch")
@dataclass(frozen=True, kw_only=True)
class Sketch(BaseSparseAlgorithm):
    """Keeps the pages with the most attention, as estimated from sketches of their keys.

    A page's share of the softmax is the log-sum-exp of its tokens' logits. The sketch estimates
    it from 8 bits per channel for the page as a whole, and 2 bits per token in the channels that
    vary most within the page. A token differs from its neighbours in few channels, and these
    channels change from page to page. A sketch depends only on the page's keys, so nothing is
    calibrated. Our own method; docs/sketch.md compares it with what else was tried.

    Attributes:
        detail: in [0, 1]; share of the channels that store bits for each token.
        economy: keep sketches in host memory, and on the device only an outline of each page, half
            a byte a channel: about 2% of bf16 keys. A step then chooses candidates by outlines,
            eight for each page that it attends, and ranks them by their sketches.
    """

    store_version: ClassVar[int | None] = 1
    recordable: ClassVar[bool] = True
    captured_launches: ClassVar[int] = 8
    host_launches: ClassVar[int] = 36
    host_candidates: ClassVar[int] = 8
    kernels: ClassVar[tuple[str, ...]] = ("sketch_score", "page_sketch")

    detail: float = 0.3125
    economy: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.detail <= 1:
            raise ValueError(f"detail: got {self.detail}, expected 0 to 1")

    def layout(self, kv: KVSpec, device: str = "cuda") -> SketchLayout:
        """Layout of the sketch of one page and KV head, for a type of device."""
        # A page of one token is its own mean.
        count = round(self.detail * kv.head_dim) if kv.page_size > 1 else 0
        return SketchLayout(kv.head_dim, kv.page_size, count, device != "cpu")

    def appends(self, policy: SelectionPolicy) -> bool:
        heads = policy.kv.num_q_heads, policy.kv.num_kv_heads
        return not self.economy and policy.heads < heads[0] and scores_new_tokens(*heads)

    def _layout(self, step: PrefillStep | DecodeStep) -> SketchLayout:
        return step.once("layout", lambda: self.layout(step.policy.kv, step.policy.device))

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        heads, dim = policy.kv.num_kv_heads, policy.kv.head_dim
        shape = (heads, self.layout(policy.kv, policy.device).num_bytes)
        if not self.economy:
            return {_SKETCH: Representation(shape, torch.uint8)}
        return {
            _SKETCH: Representation(shape, torch.uint8, memory="host"),
            _OUTLINE: Representation((heads, outline_bytes(dim)), torch.uint8),
        }

    def store(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: PrefillStep | DecodeStep
    ) -> None:
        sketches, layout = step.representations[_SKETCH][layer_id], self._layout(step)
        page_sketch(keys, sketches, host_pages, layout)
        if self.economy:
            where = host_pages.long()
            step.representations[_OUTLINE][layer_id, where] = page_outline(sketches[where], layout)

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        with serial_operators(queries.device):
            return self._select(queries, layer_id, step)

    def _select(self, query: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        """Select for ``query [B, Hq, D]``, before the softmax scale."""
        policy = step.policy
        if self.economy and step.max_pages > self.host_candidates * policy.max_pages:
            return self._select_candidates(query, layer_id, step)
        scores, rest = self.score(query, layer_id, step, tail=_shared_tail(layer_id, step))
        rule, forced = policy.select_rule, step.forced_pages
        return select(scores, step.num_pages, rule, forced=forced, rest=rest)

    def score(
        self, query: Tensor, layer_id: int, step: DecodeStep, *, tail: TailPages | None
    ) -> tuple[Tensor, Tensor | None]:
        """Estimate the log-sum-exp of the logits of each page's tokens.

        Args:
            query: ``[B, Hq, D]``, model's dtype, before the softmax scale.
            tail: the tail pages; None: their scores are not wanted.

        Returns:
            ``[B, Hq, max_pages] float32``; and of the tail pages ``[B, Hq] float32`` or None.
        """
        sketches, layout = step.representations[_SKETCH][layer_id], self._layout(step)
        table, scale = step.host_page_table[:, : step.max_pages], step.policy.scale
        return sketch_score(query, sketches, table, step.num_pages, layout, scale=scale, tail=tail)

    def _select_candidates(self, query: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        """Select among the pages that outlines choose, for each head of the selection its own."""
        policy, heads = step.policy, step.policy.heads
        num_candidates = self.host_candidates * policy.max_pages
        table = step.host_page_table[:, : step.max_pages]
        candidates = select(
            outline_score(
                query.float() * (policy.scale / _TEMPERATURE),
                step.representations[_OUTLINE][layer_id],
                table,
                step.num_pages,
            ),
            step.num_pages,
            policy.select_rule_with(max_pages=num_candidates),
            forced=step.forced_pages,
        )
        # From here on each head of the selection is a request, whose pages are its candidates. Its
        # sketches are those of its KV head, or of all heads for the scope "layer".
        pages = candidates.pages.flatten(0, 1)
        place = candidates.pages.clamp(min=0).long().flatten(1)
        groups = min(heads, policy.kv.num_kv_heads)
        group = torch.arange(heads, dtype=table.dtype, device=table.device) * groups // heads
        entries = table.gather(1, place).view_as(candidates.pages) * groups + group[:, None]
        sketches = step.representations[_SKETCH][layer_id].unflatten(1, (groups, -1)).flatten(0, 1)
        lengths = candidates.lengths.flatten()
        scores, rest = sketch_score(
            query.unflatten(1, (heads, -1)).flatten(0, 1),
            sketches,
            entries.flatten(0, 1),
            lengths,
            self._layout(step),
            scale=policy.scale,
            tail=_shared_tail(layer_id, step),
        )
        best = select(
            scores,
            lengths,
            policy.select_rule_with(heads=1),
            forced=step.forced_pages.gather(1, place).view_as(pages),
            rest=rest,
        )
        chosen = pages.gather(1, best.pages[:, 0].clamp(min=0).long())
        chosen = chosen.masked_fill(best.pages[:, 0] < 0, -1)
        shape = candidates.lengths.shape
        return Selection(chosen.view(*shape, -1), best.lengths.view(shape))


def _shared_tail(layer_id: int, step: DecodeStep) -> TailPages | None:
    """The tail pages, always attended, which heads that share a selection compare pages with."""
    shared = step.policy.heads < step.policy.kv.num_q_heads
    return step.tail_pages(layer_id, with_new=True) if shared else None
