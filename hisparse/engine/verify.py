"""Verification of drafts: runs of nodes are decode steps, and rejected nodes are undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hisparse.cache import SparseKVCacheManager
from hisparse.cache.snapshot import RowSnapshot, save_rows
from hisparse.cache.swap_in import SwapInLog
from hisparse.engine.drafts import VerifyBatch, VerifyStep
from hisparse.engine.representations import Representations
from hisparse.engine.step import DecodeForward
from hisparse.engine.verify_return import Return, Returns
from hisparse.kernels import serial_operators
from hisparse.types import IndexerInputs

__all__ = ["Verification"]

#: ``(layer_id, q, k, v, step, indexer)``: attention of one decode step in one layer.
Attend = Callable[[int, Tensor, Tensor, Tensor, DecodeForward, IndexerInputs | None], Tensor]


@dataclass(kw_only=True)
class _Saved:
    """What a step found in one layer, and what it did.

    Attributes:
        rows: the device tables before the step.
        entries: ``[b, W, ...]`` of each representation of pages that drafts can fill, before it.
        filled: the same after it; None: the step fills no page.
        log: what it swapped in.
    """

    rows: RowSnapshot
    entries: list[Tensor]
    filled: list[Tensor] | None
    log: SwapInLog


class Verification:
    """Serves the nodes of a batch of drafts run by run, layer by layer.

    A run, in which each node is the parent of the next, is one decode step: its tokens are written,
    all nodes select at once, each with its own query, and the LRU order takes the selections one
    after the other. The tail page, the LRU order and the representations are those that decoding
    the nodes one by one would leave. A run ends where a node fills a page.

    Before a run whose first node's parent was not served last, and after the verification, a
    request goes back to the state after an earlier node. Until then only descendants of that node
    were served: the host slots of the positions up to it still hold its path.

    Args:
        batch: the drafts.
        steps: the runs, in order.
        forwards: the decode step of each of ``steps``.
        manager: the cache.
        representations: tensors of the algorithm.
    """

    def __init__(
        self,
        batch: VerifyBatch,
        steps: Sequence[VerifyStep],
        forwards: Sequence[DecodeForward],
        manager: SparseKVCacheManager,
        representations: Representations,
    ) -> None:
        self._batch = batch
        self._steps = steps
        self._forwards = forwards
        self._manager = manager
        self._representations = representations
        self._device = manager.device.device
        self._returns = Returns(batch, steps, forwards, manager)
        self._width = int(manager.residency.held(batch.slots_cpu).max())
        self._saved: dict[tuple[int, int], _Saved] = {}
        count = batch.parents.shape[1]
        tokens = [step.pairs @ [count, 1] for step in steps]
        self._tokens = [self._upload(each) for each in tokens]
        self._filling = [self._filled_pages(list(step.runs)) for step in steps]
        self._back = [list(self._moves(step)) for step in steps]
        self._returnable = [self._can_return(step) for step in steps]
        self._output = self._output_index(np.concatenate(tokens))
        self._own = self._own_slots()

    def attention(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        indexer: IndexerInputs | None,
        attend: Attend,
    ) -> Tensor:
        """``q [B * n, Hq, D]``, ``k, v [B * n, Hkv, D]`` -> ``[B * n, Hq, Dv]``."""
        outputs: list[Tensor] = []
        for number, forward in enumerate(self._forwards):
            tokens = self._tokens[number]
            with serial_operators(q.device):
                for back in self._back[number]:
                    self._go_back(layer_id, back)
                if number:
                    forward.read_tails(layer_id, self._manager.device)
                saved = self._save(layer_id, number)
                inputs = indexer and indexer.take(tokens)
                nodes = (q[tokens], k[tokens], v[tokens])
            if saved is None:
                outputs.append(attend(layer_id, *nodes, forward, inputs))
                continue
            with self._manager.logged() as saved.log:
                outputs.append(attend(layer_id, *nodes, forward, inputs))
            if forward.filled is not None:
                saved.filled = self._entries(layer_id, number)
        with serial_operators(q.device):
            if self._own is not None:
                tokens, slots = self._own
                self._manager.kv_io.write(layer_id, slots, k[tokens], v[tokens])
            out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
            return out if self._output is None else out[self._output]

    def accept(self, nodes: np.ndarray) -> None:
        """Go back to the state after the last accepted node of each request.

        K and V of the accepted nodes are in the host slots of their positions by now.

        Args:
            nodes: ``[B]``, indices of the nodes.
        """
        trees = self._batch.trees
        kept = [int(tree.twins[node]) for tree, node in zip(trees, nodes, strict=True)]
        back = {b: n for b, n in enumerate(kept) if trees[b].order[-1] != n}
        for each in self._returns.to(back):
            for layer_id in range(self._representations.num_layers):
                with serial_operators(self._device):
                    self._go_back(layer_id, each)

    def _upload(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)

    def _moves(self, step: VerifyStep) -> Iterator[Return]:
        """The requests of a step that go back to their first node's parent before it."""
        trees = self._batch.trees
        yield from self._returns.to({b: int(trees[b].parents[step.runs[b][0]]) for b in step.moved})

    def _can_return(self, step: VerifyStep) -> bool:
        """Whether a request can go back to one of the nodes of a step."""
        return any(self._batch.trees[b].order[-1] != n for b, run in step.runs.items() for n in run)

    def _filled_pages(self, requests: list[int]) -> Tensor | None:
        """``[b, W] int64``, host pages that drafts can fill, 0 behind them; None: none."""
        batch, size = self._batch, self._manager.host.kv.page_size
        first, end = (x[requests] // size for x in (batch.seq_lens_cpu, batch.longest))
        most = int((batch.longest // size - batch.seq_lens_cpu // size).max())
        if not most:
            return None
        pages = first[:, None] + np.arange(most)
        real = self._upload(pages < end[:, None]).bool()
        table = batch.host_page_table[self._upload(np.array(requests))]
        found = table.gather(1, self._upload(pages).clamp(max=table.shape[1] - 1))
        return found.where(real, 0).long()

    def _output_index(self, tokens: np.ndarray) -> Tensor | None:
        """``[B * n]``, which served token each token's output is; None: all, in their order."""
        batch = self._batch
        place = np.zeros(batch.num_tokens, dtype=np.int64)
        place[tokens] = np.arange(len(tokens))
        first = np.arange(len(batch.trees))[:, None] * batch.parents.shape[1]
        index = place[(first + [tree.twins for tree in batch.trees]).flatten()]
        if len(tokens) == len(index) and (index == np.arange(len(index))).all():
            return None
        return self._upload(index)

    def _own_slots(self) -> tuple[Tensor, Tensor] | None:
        """Nodes whose own host slot is not that of their position, and these slots.

        A verification moves accepted K and V from the nodes' own slots to those of their positions.
        """
        batch = self._batch
        count = batch.parents.shape[1]
        tokens = [
            b * count + node
            for b, tree in enumerate(batch.trees)
            if any(tree.depths[node] != node for node in tree.order)
            for node in tree.order
        ]
        if not tokens:
            return None
        index = self._upload(np.array(tokens))
        return index, batch.host_slots.flatten()[index]

    def _save(self, layer_id: int, number: int) -> _Saved | None:
        """Keep the state before a step, unless no request can return to one of its nodes."""
        if not self._returnable[number]:
            return None
        rows = save_rows(self._manager.device, layer_id, self._returns.rows[number], self._width)
        entries = self._entries(layer_id, number)
        saved = _Saved(rows=rows, entries=entries, filled=None, log=[])
        self._saved[layer_id, number] = saved
        return saved

    def _entries(self, layer_id: int, number: int) -> list[Tensor]:
        """Representations of the pages that drafts can fill."""
        pages = self._filling[number]
        if pages is None:
            return []
        return [tensor[layer_id, pages] for tensor in self._tensors(layer_id)]

    def _tensors(self, layer_id: int) -> list[Tensor]:
        """Representations of pages; a layer with a window has none."""
        windowed = self._manager.host.kv.window(layer_id)
        return [] if windowed else self._representations.per_page

    def _go_back(self, layer_id: int, back: Return) -> None:
        """Return to the state after an earlier node, in one layer."""
        saved, pages = self._saved[layer_id, back.step], self._filling[back.step]
        back.restore(layer_id, self._manager, saved.rows, saved.log)
        if pages is not None:
            kept = saved.filled if back.fills else saved.entries
            assert kept is not None, "the step filled a page"
            for tensor, entries in zip(self._tensors(layer_id), kept, strict=True):
                tensor[layer_id, pages[back.index]] = entries[back.index]
