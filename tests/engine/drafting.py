"""A simulator that verifies drafts, and random drafts for it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hisparse.engine.verify import VerifyBatch
from hisparse.testing import Request, Simulator
from hisparse.types import IndexerInputs

__all__ = ["Draft", "DraftingSimulator", "random_draft"]


@dataclass
class Draft:
    """The drafts of one request.

    Attributes:
        request: its computed tokens are those before token 0.
        sources: for each token, the request and the position that its q, k and v come from.
        length: tokens of the chain; the others are never accepted.
        accepted: the last accepted token.
    """

    request: Request
    sources: list[tuple[Request, int]]
    length: int
    accepted: int


class DraftingSimulator(Simulator):
    """Verifies drafts as SGLang does: one forward, then what is accepted."""

    def reserve(self, request: Request, length: int) -> None:
        """Give a request the host pages of its first ``length`` tokens."""
        self._grow(request, length)

    def verify(self, *drafts: Draft) -> Tensor:
        """Verify drafts of equal size; returns ``[L, B, n, Hq, D]``, and keeps the accepted."""
        self.coordinator.forward_begin(self.verify_batch(*drafts))
        shape = (len(drafts), len(drafts[0].sources))
        outs = []
        for layer in range(self.layers):
            tokens = [s for draft in drafts for s in draft.sources]
            streams = zip(*([x[layer, at] for x in r.streams] for r, at in tokens), strict=True)
            q, k, v, *indexer = (torch.stack(parts) for parts in streams)
            inputs = IndexerInputs(*indexer) if self.algorithm.indexer else None
            sinks = None if self.sinks is None else self.sinks[layer]
            out = self.coordinator.attention(layer, q, k, v, inputs, sinks)
            outs.append(out.unflatten(0, shape))
        self.coordinator.forward_end()
        self.coordinator.accept_drafts(np.array([draft.accepted for draft in drafts]))
        for draft in drafts:
            draft.request.done += draft.accepted + 1
        return torch.stack(outs)

    def verify_batch(self, *drafts: Draft) -> VerifyBatch:
        """Drafts of equal size as the engine takes them."""
        requests = [draft.request for draft in drafts]
        count = len(drafts[0].sources)
        tables = [self._grow(r, r.done + count) for r in requests]
        width = max(map(len, tables))
        table = torch.zeros(len(requests), width, dtype=torch.int32)
        for row, pages in enumerate(tables):
            table[row, : len(pages)] = pages
        return VerifyBatch(
            slots=torch.tensor([r.slot for r in requests]),
            slots_cpu=np.array([r.slot for r in requests]),
            seq_lens_cpu=np.array([r.done for r in requests]),
            chain_lengths=np.array([draft.length for draft in drafts]),
            host_slots=torch.stack([self._slots(r, r.done, r.done + count) for r in requests]),
            host_page_table=table,
        )


def random_draft(request: Request, other: Request, count: int, rng: random.Random) -> Draft:
    """A random chain that starts with the request's own next tokens.

    Args:
        request: the request.
        other: a request of the same length; rejected drafts have its tokens.
        count: tokens, those after the chain included.
        rng: decides how long the chain is, and how much of it is accepted.
    """
    first, length = request.done, rng.randint(1, count)
    most = min(length, request.length - first)
    right = rng.choice([most, rng.randint(1, most)])
    sources = [
        (request, first + i) if i < right else (other, (first + i) % other.length)
        for i in range(count)
    ]
    return Draft(request, sources, length, right - 1)
