"""Verification of drafts: runs of tokens are decode steps, and rejected tokens are undone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Serves chains of drafts run by run, layer by layer.

    A run is one decode step: its tokens are written, all of them select at once, each with its own
    query, and the LRU order takes the selections one after the other. The tail page, the LRU order
    and the representations are those that decoding the tokens one by one would leave. A run ends
    where a token fills a page.

    After the verification, a request goes back to the state after its last accepted token. Until
    then the host slots of the chain's positions hold the whole chain.

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
        count = batch.host_slots.shape[1]
        tokens = [step.pairs @ [count, 1] for step in steps]
        self._tokens = [self._upload(each) for each in tokens]
        self._filling = [self._filled_pages(list(step.runs)) for step in steps]
        self._returnable = [self._can_return(step) for step in steps]
        self._output = self._output_index(np.concatenate(tokens))

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
                if number:
                    forward.read_tails(layer_id, self._manager.device)
                saved = self._save(layer_id, number)
                inputs = indexer and indexer.take(tokens)
                drafts = (q[tokens], k[tokens], v[tokens])
            if saved is None:
                outputs.append(attend(layer_id, *drafts, forward, inputs))
                continue
            with self._manager.logged() as saved.log:
                outputs.append(attend(layer_id, *drafts, forward, inputs))
            if forward.filled is not None:
                saved.filled = self._entries(layer_id, number)
        with serial_operators(q.device):
            out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
            return out if self._output is None else out[self._output]

    def accept(self, last: np.ndarray) -> None:
        """Go back to the state after the last accepted token of each request.

        Args:
            last: ``[B]``, the token's place in the chain.
        """
        ends = self._batch.chain_lengths - 1
        undone = {int(b): int(last[b]) for b in np.flatnonzero(last < ends)}
        for each in self._returns.to(undone):
            for layer_id in range(self._representations.num_layers):
                with serial_operators(self._device):
                    self._go_back(layer_id, each)

    def _upload(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device)

    def _can_return(self, step: VerifyStep) -> bool:
        """Whether a step serves a token that is not the last of its chain."""
        ends = self._batch.chain_lengths - 1
        return any(run.start < ends[b] for b, run in step.runs.items())

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
        num_requests, count = self._batch.host_slots.shape
        first = np.arange(num_requests)[:, None] * count
        served = np.arange(count) < self._batch.chain_lengths[:, None]
        place = np.zeros(num_requests * count, dtype=np.int64)
        place[tokens] = np.arange(len(tokens))
        index = place[np.where(served, first + np.arange(count), first).flatten()]
        if len(tokens) == len(index) and (index == np.arange(len(index))).all():
            return None
        return self._upload(index)

    def _save(self, layer_id: int, number: int) -> _Saved | None:
        """Keep the state before a step, unless no request can return to one of its tokens."""
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
        """Return to the state after an earlier token, in one layer."""
        saved, pages = self._saved[layer_id, back.step], self._filling[back.step]
        back.restore(layer_id, self._manager, saved.rows, saved.log)
        if pages is not None:
            kept = saved.filled if back.fills else saved.entries
            assert kept is not None, "the step filled a page"
            for tensor, entries in zip(self._tensors(layer_id), kept, strict=True):
                tensor[layer_id, pages[back.index]] = entries[back.index]
