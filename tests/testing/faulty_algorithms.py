"""Algorithms with one planted fault each, and the checks that have to find it.

Here: in what they declare, select, and make of other requests; ``faulty_state.py`` has the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hisparse.algorithms import (
    BaseSparseAlgorithm,
    DecodeStep,
    PageScoreAlgorithm,
    PrefillStep,
    Representation,
    SelectionPolicy,
)
from hisparse.types import KVSpec, Selection


@dataclass(frozen=True, kw_only=True)
class Right(PageScoreAlgorithm):
    """Scores a page by its mean key; has no fault."""

    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ValueError(f"weight: got {self.weight}, expected a number above 0")

    def summary_shape(self, kv: KVSpec) -> tuple[int, ...]:
        return (kv.num_kv_heads, kv.head_dim)

    def summarize(self, keys: Tensor, mask: Tensor) -> Tensor:
        return keys.masked_fill(~mask[..., None, None], 0).mean(1)

    def score(self, query: Tensor, summaries: Tensor) -> Tensor:
        means = summaries.permute(0, 2, 3, 1)
        return (query.unflatten(1, (means.shape[1], -1)) @ means * self.weight).flatten(1, 2)


#: Algorithm to the names of the checks that fail.
FAULTS: dict[type[BaseSparseAlgorithm], set[str]] = {}


def finds(*checks: str) -> Callable[[type], type]:
    def decorate(cls: type) -> type:
        cls = dataclass(frozen=True, kw_only=True)(cls)
        cls.__doc__ = "An algorithm with a fault."
        FAULTS[cls] = set(checks)
        return cls

    return decorate


def select(algorithm: Right, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
    """The right selection."""
    return Right.retrieve_topk(algorithm, queries, layer_id, step)


@finds("declarations")
class DeclaresNoScope(Right):
    scopes: ClassVar = ()


@finds("declarations")
class DeclaresAnOddPageSize(Right):
    page_sizes: ClassVar = (8, 0)


@finds("declarations")
class DeclaresAnEmptyRepresentation(Right):
    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        return super().representations(policy) | {"none": Representation((0,), torch.int32)}


@finds("options")
class TakesAnyNumber(Right):
    def __post_init__(self) -> None:
        pass


@finds("options")
class DoesNotNameTheOption(Right):
    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ValueError("bad value")


@finds("runs")
class GivesPagesAsInt64(Right):
    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        pages, lengths = select(self, queries, layer_id, step)
        return Selection(pages.long(), lengths)


@finds("runs")
class Raises(Right):
    def score(self, query: Tensor, summaries: Tensor) -> Tensor:
        return {}["not there"]


@finds("runs")
class CannotDoAScopeThatItDeclares(Right):
    def score(self, query: Tensor, summaries: Tensor) -> Tensor:
        return super().score(query, summaries)[:, :5]


def beyond_budget(step: DecodeStep) -> Tensor:
    """Requests that are sparse, ``[B, 1, 1]``."""
    return step.num_pages[:, None, None] > step.policy.budget_pages


class RightInPrefill(Right):
    def prefill_choices(self, policy: SelectionPolicy) -> int:
        return 1 << 20


@finds("runs")
class AttendsTheFutureInPrefill(RightInPrefill):
    def select_prefill(self, layer_id: int, step: PrefillStep) -> Tensor | None:
        return torch.arange(step.length, dtype=torch.int32).expand(step.length, -1)


@finds("chunks", "shared prefix")
class AttendsTheChunkOnlyInPrefill(RightInPrefill):
    def select_prefill(self, layer_id: int, step: PrefillStep) -> Tensor | None:
        own = torch.arange(step.start, step.start + step.length, dtype=torch.int32)
        return torch.where(own <= own[:, None], own, -1)


@finds("runs")
class SelectsTheTailPage(Right):
    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        pages, lengths = select(self, queries, layer_id, step)
        # One of the pages that were chosen, between sinks and recent pages, makes room.
        tail = step.num_pages[:, None, None].expand(-1, pages.shape[1], 1)
        other = torch.cat([pages[..., :1], pages[..., 2:], tail], dim=-1)
        return Selection(torch.where(beyond_budget(step), other, pages), lengths)


@finds("scores")
class DividesByTheNormOfAKey(Right):
    def score(self, query: Tensor, summaries: Tensor) -> Tensor:
        return super().score(query, summaries / summaries.norm(dim=-1, keepdim=True))


@finds("scores")
class SelectsAPageByInfinity(Right):
    def score(self, query: Tensor, summaries: Tensor) -> Tensor:
        scores = super().score(query, summaries)
        return torch.cat([torch.full_like(scores[..., :1], torch.inf), scores[..., 1:]], dim=-1)


@finds("runs")
class SelectsAPageTwice(Right):
    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        pages, lengths = select(self, queries, layer_id, step)
        twice = torch.cat([pages[..., :1], pages[..., :1], pages[..., 2:]], dim=-1)
        return Selection(torch.where(beyond_budget(step), twice, pages), lengths)


@finds("runs")
class SelectsTheBestFirst(Right):
    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        pages, lengths = select(self, queries, layer_id, step)
        return Selection(pages.flip(-1), lengths)


@finds("runs")
class CountsWrong(Right):
    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        pages, lengths = select(self, queries, layer_id, step)
        return Selection(pages, lengths - 1)


def without(pages: Tensor, lengths: Tensor, unwanted: Tensor) -> Selection:
    """A selection without some pages."""
    last = torch.iinfo(torch.int32).max
    pages = torch.where(unwanted | (pages < 0), last, pages).sort(-1).values
    there = pages < last
    return Selection(torch.where(there, pages, -1), there.sum(-1, dtype=torch.int32))


@finds("sinks and recents", "dense")
class ForgetsTheSink(Right):
    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        pages, lengths = select(self, queries, layer_id, step)
        return without(pages, lengths, pages == 0)


@finds("sinks and recents")
class KeepsOneRecentPage(Right):
    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        pages, lengths = select(self, queries, layer_id, step)
        unwanted = pages == step.num_pages[:, None, None] - 2
        return without(pages, lengths, unwanted & beyond_budget(step))


@finds("runs")
class KeepsOnePageTooMany(Right):
    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        pages, lengths = select(self, queries, layer_id, step)
        width = pages.shape[-1]
        # The lowest page that is not selected yet.
        missing = (pages != torch.arange(width)).int().argmax(-1, keepdim=True).int()
        more = torch.cat([pages, missing], dim=-1)
        over = lengths[..., None] == width
        fewer = torch.nn.functional.pad(pages, (0, 1), value=-1)
        pages = torch.where(over, more.sort(-1).values, fewer)
        return Selection(pages, lengths + over[..., 0].int())


@finds("dense")
class LeavesAPageOutOfAShortContext(Right):
    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        pages, lengths = select(self, queries, layer_id, step)
        unwanted = (pages == 1) & (step.num_pages[:, None, None] > 3)
        return without(pages, lengths, unwanted & ~beyond_budget(step))


@finds("batch order")
class ScoresByTheRowInTheBatch(Right):
    def score(self, query: Tensor, summaries: Tensor) -> Tensor:
        row = torch.arange(query.shape[0])
        scores = super().score(query, summaries)
        return torch.where((row == 1)[:, None, None], -scores, scores)


@finds("other requests", "replays")
class ScoresByTheMeanQueryOfTheBatch(Right):
    def score(self, query: Tensor, summaries: Tensor) -> Tensor:
        return super().score(query.mean(0, keepdim=True).expand_as(query), summaries)


@finds("other requests")
class KeepsWhatIsNearTheBestOfTheBatch(Right):
    variable_lengths: ClassVar[bool] = True

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        pages, lengths = select(self, queries, layer_id, step)
        scores = self.score_pages(queries, layer_id, step).unflatten(1, (pages.shape[1], -1))
        page, count = torch.arange(scores.shape[-1]), step.num_pages[:, None, None]
        scores = scores.amax(2).masked_fill(page >= count, -torch.inf)
        far = scores < scores.amax() - 2
        far &= (page > 0) & (page < count - 2)
        return without(pages, lengths, far.gather(-1, pages.clamp(min=0).long()))


@finds("reused slot")
class MergesWhatWasThere(Right):
    """Host pages are reused and contain data of earlier requests."""

    def store(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: PrefillStep | DecodeStep
    ) -> None:
        stored = step.representations
        new = self.summarize(keys, torch.ones(keys.shape[:2], dtype=torch.bool))
        old = stored["summary"][layer_id, host_pages].nan_to_num()
        stored["summary"][layer_id, host_pages] = torch.where(old.abs() > new.abs(), old, new)


@finds("reused slot", "replays")
class RemembersOutsideOfRepresentations(Right):
    """Its own state of a request slot is not cleared for the next request."""

    query_window: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "kept", {})

    def construct_representations(
        self, keys: Tensor, queries: Tensor, layer_id: int, step: PrefillStep
    ) -> None:
        super().construct_representations(keys, queries, layer_id, step)
        if step.is_last:
            shape = (2, 8, *queries.shape[1:])
            kept = self.kept.setdefault("queries", torch.zeros(shape))[layer_id, step.slot]
            torch.where(queries[-1].abs() > kept.abs(), queries[-1], kept, out=kept)

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        return select(self, self.kept["queries"][layer_id, step.slots], layer_id, step)


@finds("shared prefix")
class RemembersWhoseAPageIs(Right):
    """A shared page gets the mark of the first request."""

    def construct_representations(
        self, keys: Tensor, queries: Tensor, layer_id: int, step: PrefillStep
    ) -> None:
        sign = -1 if step.slot == 2 else 1
        super().construct_representations(sign * keys, queries, layer_id, step)
