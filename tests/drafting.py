"""A simulator that verifies drafts, and random drafts for it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hisparse.engine.drafts import VerifyBatch
from hisparse.testing import Request, Simulator
from hisparse.types import IndexerInputs

__all__ = ["Draft", "DraftingSimulator", "random_draft"]


@dataclass
class Draft:
    """The drafts of one request.

    Attributes:
        request: its computed tokens are those before node 0.
        parents: parent of each node; -1 for node 0.
        sources: for each node, the request and the position that its q, k and v come from.
        accepted: the last accepted node.
    """

    request: Request
    parents: list[int]
    sources: list[tuple[Request, int]]
    accepted: int

    def path(self, node: int) -> list[int]:
        """Nodes from node 0 to ``node``."""
        return [*self.path(self.parents[node]), node] if node else [0]


class DraftingSimulator(Simulator):
    """Verifies drafts as SGLang does: one forward, then a move of the accepted K and V."""

    def reserve(self, request: Request, length: int) -> None:
        """Give a request the host pages of its first ``length`` tokens."""
        self._grow(request, length)

    def verify(self, *drafts: Draft) -> Tensor:
        """Verify drafts of equal size; returns ``[L, B, n, Hq, D]``, and keeps the accepted."""
        batch = self._verify_batch(drafts)
        self.coordinator.forward_begin(batch)
        shape = (len(drafts), len(drafts[0].parents))
        outs = []
        for layer in range(self.layers):
            nodes = [s for draft in drafts for s in draft.sources]
            streams = zip(*([x[layer, at] for x in r.streams] for r, at in nodes), strict=True)
            q, k, v, *indexer = (torch.stack(tokens) for tokens in streams)
            inputs = IndexerInputs(*indexer) if self.algorithm.indexer else None
            sinks = None if self.sinks is None else self.sinks[layer]
            out = self.coordinator.attention(layer, q, k, v, inputs, sinks)
            outs.append(out.unflatten(0, shape))
        self.coordinator.forward_end()
        for draft, slots in zip(drafts, batch.host_slots, strict=True):
            path = draft.path(draft.accepted)
            self.manager.kv_io.move(slots[: len(path)], slots[path])
            draft.request.done += len(path)
        self.coordinator.accept_drafts(np.array([draft.accepted for draft in drafts]))
        return torch.stack(outs)

    def _verify_batch(self, drafts: tuple[Draft, ...]) -> VerifyBatch:
        requests = [draft.request for draft in drafts]
        count = len(drafts[0].parents)
        tables = [self._grow(r, r.done + count) for r in requests]
        width = max(map(len, tables))
        table = torch.zeros(len(requests), width, dtype=torch.int32)
        for row, pages in enumerate(tables):
            table[row, : len(pages)] = pages
        names: dict[tuple[int, int], int] = {}
        tokens = [
            [names.setdefault((id(r), at), len(names)) for r, at in draft.sources]
            for draft in drafts
        ]
        return VerifyBatch(
            slots=torch.tensor([r.slot for r in requests]),
            slots_cpu=np.array([r.slot for r in requests]),
            seq_lens_cpu=np.array([r.done for r in requests]),
            parents=np.array([draft.parents for draft in drafts]),
            tokens=np.array(tokens),
            host_slots=torch.stack([self._slots(r, r.done, r.done + count) for r in requests]),
            host_page_table=table,
        )


def random_draft(request: Request, other: Request, count: int, rng: random.Random) -> Draft:
    """A random tree, in which a path from node 0 on has the request's own next tokens.

    Args:
        request: the request.
        other: a request of the same length; rejected nodes have its tokens.
        count: nodes.
        rng: decides the shape of the tree.
    """
    parents, right, depths = [-1], [0], [0]
    for node in range(1, count):
        parent = rng.choice([right[-1], right[-1], node - 1, rng.randrange(node)])
        parents.append(parent)
        depths.append(depths[parent] + 1)
        if parent == right[-1] and rng.random() < 0.7:
            right.append(node)
    first = request.done
    left = request.length - first
    right = [node for node in right if depths[node] < left]
    sources = []
    for node, depth in enumerate(depths):
        # Two wrong nodes with the same parent may be twins.
        wrong = (other, (first + depth + rng.randrange(2)) % other.length)
        sources.append((request, first + depth) if node in right else wrong)
    return Draft(request, parents, sources, right[-1])
