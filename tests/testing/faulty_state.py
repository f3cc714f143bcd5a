"""Algorithms with one planted fault each, in representations or in the decode path."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from hisparse.algorithms import DecodeStep, PrefillStep, Representation, SelectionPolicy
from hisparse.types import Selection
from tests.testing.faulty_algorithms import FAULTS, Right, finds, select

__all__ = ["FAULTS"]


@finds("chunks", "shared prefix", "decoded pages")
class CentresKeysByTheChunk(Right):
    def construct_representations(
        self, keys: Tensor, queries: Tensor, layer_id: int, step: PrefillStep
    ) -> None:
        if keys.shape[0]:
            keys = keys - keys.mean((0, 1)) * 4
        super().construct_representations(keys, queries, layer_id, step)


@finds("chunks")
class SeesOnlyTheQueriesOfTheLastChunk(Right):
    """Scores by the mean of the prompt's last queries, but sees only those of one chunk."""

    query_window: ClassVar[int] = 16

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        shape = (policy.kv.num_q_heads, policy.kv.head_dim)
        state = Representation(shape, torch.float32, per="request")
        return super().representations(policy) | {"query": state}

    def construct_representations(
        self, keys: Tensor, queries: Tensor, layer_id: int, step: PrefillStep
    ) -> None:
        super().construct_representations(keys, queries, layer_id, step)
        if step.is_last:
            mean = queries[-self.query_window :].mean(0)
            step.representations["query"][layer_id, step.slot] = mean

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        return select(self, step.representations["query"][layer_id, step.slots], layer_id, step)


@finds("decoded pages")
class KeepsHalfOfADecodedPage(Right):
    def update_representations(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: DecodeStep
    ) -> None:
        super().update_representations(keys / 2, layer_id, host_pages, step)


@finds("writes")
class WritesALayerAhead(Right):
    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        return super().representations(policy) | {"more": Representation((), torch.float32)}

    def store(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: PrefillStep | DecodeStep
    ) -> None:
        super().store(keys, layer_id, host_pages, step)
        step.representations["more"][1 - layer_id, host_pages] = 1


@finds("chunks", "decoded pages", "writes")
class WritesAPageBeforeItIsFull(Right):
    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        return super().representations(policy) | {"more": Representation((), torch.float32)}

    def construct_representations(
        self, keys: Tensor, queries: Tensor, layer_id: int, step: PrefillStep
    ) -> None:
        super().construct_representations(keys, queries, layer_id, step)
        step.representations["more"][layer_id, step.context_pages[-1]] = 1


@finds("writes")
class WritesEveryRequestsState(Right):
    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        state = Representation((), torch.float32, per="request")
        return super().representations(policy) | {"steps": state}

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        step.representations["steps"][layer_id].add_(1)
        return select(self, queries, layer_id, step)


@finds("inputs untouched")
class ScalesQueriesInPlace(Right):
    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        selection = select(self, queries, layer_id, step)
        queries.mul_(1.000001)
        return selection


@finds("no syncs", "replays")
class ReadsANumberBack(Right):
    def score(self, query: Tensor, summaries: Tensor) -> Tensor:
        assert query.abs().amax().item() < 1e9
        return super().score(query, summaries)


@finds("no syncs", "replays")
class ListsANumberOfPages(Right):
    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        assert max(step.num_pages.tolist()) > 0
        return select(self, queries, layer_id, step)


@finds("no syncs", "replays")
class IndexesByAMask(Right):
    def score(self, query: Tensor, summaries: Tensor) -> Tensor:
        scores = super().score(query, summaries)
        low = scores < 0
        scores[low] = scores[low] * 1.0
        return scores


@finds("no syncs", "replays")
class CopiesALengthFromTheHost(Right):
    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        lengths = torch.tensor([step.max_pages, 0])
        assert lengths.numel() > 1
        return select(self, queries, layer_id, step)


@finds("other requests", "replays")
class ScoresByTheLongestContext(Right):
    """Uses a length on the host, which a captured step does not update."""

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        factor = step.max_pages % 3 - 1
        return select(self, queries * factor, layer_id, step)


@finds("no loops")
class LoopsOverRequests(Right):
    def score(self, query: Tensor, summaries: Tensor) -> Tensor:
        one = super().score
        return torch.cat([one(query[i : i + 1], summaries[i : i + 1]) for i in range(len(query))])


@finds("allocations")
class ConvertsEveryPage(Right):
    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        assert step.representations["summary"][layer_id].double().dtype == torch.float64
        return select(self, queries, layer_id, step)


@finds("allocations")
class KeepsEveryQuery(Right):
    kept: ClassVar[list[Tensor]] = []

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        self.kept.append(queries * 2)
        return select(self, queries, layer_id, step)
