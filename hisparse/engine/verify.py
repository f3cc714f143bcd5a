"""Verification of drafts: each node is a decode step of its own, and rejected steps are undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hisparse.cache import SparseKVCacheManager
from hisparse.cache.snapshot import RowSnapshot, restore_rows, save_rows
from hisparse.engine.drafts import VerifyBatch
from hisparse.engine.representations import Representations
from hisparse.engine.step import DecodeForward
from hisparse.kernels import serial_operators
from hisparse.types import IndexerInputs

__all__ = ["Verification"]

#: ``(layer_id, q, k, v, step, indexer)``: attention of one decode step in one layer.
Attend = Callable[[int, Tensor, Tensor, Tensor, DecodeForward, IndexerInputs | None], Tensor]


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """What a step left behind in one layer.

    Attributes:
        rows: the device tables.
        entries: ``[b, W, ...]`` of each representation of pages that drafts can fill.
    """

    rows: RowSnapshot
    entries: list[Tensor]


@dataclass(frozen=True, kw_only=True)
class _Return:
    """Requests that go back to the state after an earlier step.

    Attributes:
        step: number of that step.
        index: ``[m] int64``, the requests among those of the step.
        host_page_table: ``[m, P] int32``.
        changed_from, tail_index: ``[m] int32``, see :func:`restore_rows`.
    """

    step: int
    index: Tensor
    host_page_table: Tensor
    changed_from: Tensor
    tail_index: Tensor


class Verification:
    """Serves the nodes of a batch of drafts one after another, layer by layer.

    Every node runs as the decode step that would append its token: with a selection of its own, and
    with the tail page, the LRU order and the representations that its ancestors leave. Before a
    node whose parent was not served last, and after the verification, a request goes back to the
    state after an earlier node. Until then only descendants of that node were served: the host
    slots of the positions up to it still hold its path.

    Args:
        batch: the drafts.
        forwards: the decode step of each of ``batch.steps``.
        manager: the cache.
        representations: tensors of the algorithm.
    """

    def __init__(
        self,
        batch: VerifyBatch,
        forwards: Sequence[DecodeForward],
        manager: SparseKVCacheManager,
        representations: Representations,
    ) -> None:
        self._batch = batch
        self._forwards = forwards
        self._manager = manager
        self._representations = representations
        self._size = manager.host.kv.page_size
        self._device = manager.device.device
        self._width = int(manager.residency.held(batch.slots_cpu).max())
        self._saved: dict[tuple[int, int], _Saved] = {}
        count = batch.parents.shape[1]
        self._tokens = [self._upload(s.requests * count + s.nodes) for s in batch.steps]
        first = np.arange(len(batch.trees))[:, None] * count
        self._twins = self._upload((first + [tree.twins for tree in batch.trees]).flatten())
        self._has_twins = any((t.twins != np.arange(count)).any() for t in batch.trees)
        self._filling = [self._filled_pages(step.requests) for step in batch.steps]
        self._returns = [list(self._moves(number)) for number in range(len(batch.steps))]
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
        for number, step in enumerate(self._forwards):
            tokens = self._tokens[number]
            with serial_operators(q.device):
                for back in self._returns[number]:
                    self._go_back(layer_id, back)
                step.read_tails(layer_id, self._manager.device)
                inputs = indexer and indexer.take(tokens)
                nodes = (q[tokens], k[tokens], v[tokens])
            outputs.append(attend(layer_id, *nodes, step, inputs))
            with serial_operators(q.device):
                self._save(layer_id, number, step)
        with serial_operators(q.device):
            out = outputs[0].new_empty(q.shape[0], *outputs[0].shape[1:])
            for tokens, part in zip(self._tokens, outputs, strict=True):
                out[tokens] = part
            if self._own is not None:
                tokens, slots = self._own
                self._manager.kv_io.write(layer_id, slots, k[tokens], v[tokens])
            return out[self._twins] if self._has_twins else out

    def accept(self, nodes: np.ndarray) -> None:
        """Go back to the state after the last accepted node of each request.

        K and V of the accepted nodes are in the host slots of their positions by now.

        Args:
            nodes: ``[B]``, indices of the nodes.
        """
        trees = self._batch.trees
        kept = [int(tree.twins[node]) for tree, node in zip(trees, nodes, strict=True)]
        back = {b: n for b, n in enumerate(kept) if trees[b].order[-1] != n}
        for each in self._plan(back):
            for layer_id in range(self._representations.num_layers):
                with serial_operators(self._device):
                    self._go_back(layer_id, each)

    def _upload(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)

    def _moves(self, number: int) -> Iterator[_Return]:
        """The requests of a step that go back to their node's parent before it."""
        step = self._batch.steps[number]
        if number:
            pairs = zip(step.requests[step.moved], step.nodes[step.moved], strict=True)
            trees = self._batch.trees
            yield from self._plan({int(b): int(trees[b].parents[node]) for b, node in pairs})

    def _plan(self, nodes: dict[int, int]) -> Iterator[_Return]:
        """How requests go back to the state after a node: ``{request: node}``."""
        trees = self._batch.trees
        by_step: dict[int, list[int]] = {}
        for request, node in nodes.items():
            by_step.setdefault(trees[request].order.index(node), []).append(request)
        for number, requests in by_step.items():
            yield self._return(number, np.array(requests))

    def _return(self, number: int, requests: np.ndarray) -> _Return:
        batch, size = self._batch, self._size
        step, first = batch.steps[number], batch.seq_lens_cpu[requests]
        index = np.searchsorted(step.requests, requests)
        nodes = zip(requests, step.nodes[index], strict=True)
        ends = first + [int(batch.trees[b].depths[node]) + 1 for b, node in nodes]
        return _Return(
            step=number,
            index=self._upload(index),
            host_page_table=batch.host_page_table[self._upload(requests)],
            changed_from=self._upload(first // size).to(torch.int32),
            tail_index=self._upload(np.where(ends % size, ends // size, -1)).to(torch.int32),
        )

    def _filled_pages(self, requests: np.ndarray) -> Tensor | None:
        """``[b, W] int64``, host pages that drafts can fill, 0 behind them; None: none."""
        batch, size = self._batch, self._size
        first, end = (x[requests] // size for x in (batch.seq_lens_cpu, batch.longest))
        most = int((batch.longest // size - batch.seq_lens_cpu // size).max())
        if not most:
            return None
        pages = first[:, None] + np.arange(most)
        real = self._upload(pages < end[:, None]).bool()
        table = batch.host_page_table[self._upload(requests)]
        found = table.gather(1, self._upload(pages).clamp(max=table.shape[1] - 1))
        return found.where(real, 0).long()

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

    def _save(self, layer_id: int, number: int, step: DecodeForward) -> None:
        """Keep the state after a step, unless none of its requests can return to it."""
        batch = self._batch
        served = batch.steps[number]
        if all(len(batch.trees[b].order) == number + 1 for b in served.requests):
            return
        pages, tensors = self._filling[number], self._tensors(layer_id)
        entries = [] if pages is None else [tensor[layer_id, pages] for tensor in tensors]
        rows = save_rows(self._manager.device, layer_id, step.whole.rows.rows, self._width)
        self._saved[layer_id, number] = _Saved(rows=rows, entries=entries)

    def _tensors(self, layer_id: int) -> list[Tensor]:
        """Representations of pages; a layer with a window has none."""
        windowed = self._manager.host.kv.window(layer_id)
        return [] if windowed else self._representations.per_page

    def _go_back(self, layer_id: int, back: _Return) -> None:
        """Return to the state after an earlier step, in one layer."""
        manager, saved = self._manager, self._saved[layer_id, back.step]
        heads = manager.device.heads
        head = torch.arange(heads, device=self._device)
        restore_rows(
            manager.host,
            manager.device,
            layer_id,
            saved.rows.take((back.index[:, None] * heads + head).flatten()),
            host_page_table=back.host_page_table,
            changed_from=back.changed_from,
            tail_index=back.tail_index,
        )
        pages = self._filling[back.step]
        if pages is not None:
            for tensor, entries in zip(self._tensors(layer_id), saved.entries, strict=True):
                tensor[layer_id, pages[back.index]] = entries[back.index]
