"""How requests go back to the state after a drafted token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hisparse.cache import SparseKVCacheManager, StepRows
from hisparse.cache.snapshot import RowSnapshot, read_changed, restore_rows, save_rows
from hisparse.cache.swap_in import SwapInLog
from hisparse.engine.drafts import VerifyBatch, VerifyStep
from hisparse.engine.step import DecodeForward
from hisparse.kernels import promote_tail

__all__ = ["Return", "Returns"]


@dataclass(frozen=True, kw_only=True)
class Return:
    """Requests that go back to the state after tokens of one step.

    The tables are those before the step, changed by the swap-ins up to the tokens, and by the page
    that the tokens fill.

    Attributes:
        step: number of the step.
        index: ``[m] int64``, the requests among those of the step.
        rows: ``[m * H] int64``, the rows among those of the step.
        replays: the run up to the tokens, as an index into the rows that a part of the step swaps
            in for, by their id, and these rows.
        fills: whether the tokens fill their page; no others are in the same return.
        filled: ``[m] int32``, index of the page that each token fills, if it does.
        capacity: ``[m * H] int32``, device slots of each row.
        host_page_table: ``[m, P] int32``.
        tail_index: ``[m] int32``, see :func:`read_changed`.
    """

    step: int
    index: Tensor
    rows: Tensor
    replays: Mapping[int, tuple[Tensor, StepRows]]
    fills: bool
    filled: Tensor
    capacity: Tensor
    host_page_table: Tensor
    tail_index: Tensor

    def restore(
        self, layer_id: int, manager: SparseKVCacheManager, saved: RowSnapshot, log: SwapInLog
    ) -> None:
        """Give the rows in one layer the tables and the pages that they had after the tokens.

        Args:
            layer_id: layer number.
            manager: the cache.
            saved: tables of the step's rows before the step.
            log: what the step swapped in.
        """
        device, saved = manager.device, saved.take(self.rows)
        before = save_rows(device, layer_id, saved.rows, saved.slot_pages.shape[1])
        restore_rows(device, layer_id, saved)
        for selected, rows in log:
            if id(rows) in self.replays:
                index, tokens = self.replays[id(rows)]
                manager.replay(layer_id, selected.take(index), tokens)
        if self.fills:
            promote_tail(
                saved.rows,
                self.filled,
                torch.ones_like(saved.rows, dtype=torch.bool),
                self.capacity,
                device.state(layer_id),
                device.tail_pages[layer_id],
            )
        read_changed(
            manager.host,
            device,
            layer_id,
            before,
            host_page_table=self.host_page_table,
            tail_index=self.tail_index,
        )


class Returns:
    """Finds the way back to tokens of a verification.

    Args:
        batch: the drafts.
        steps: the runs, in order.
        forwards: the decode step of each of them.
        manager: the cache.

    Attributes:
        rows: for each step ``[b * H] int64``, state rows of its requests.
    """

    def __init__(
        self,
        batch: VerifyBatch,
        steps: Sequence[VerifyStep],
        forwards: Sequence[DecodeForward],
        manager: SparseKVCacheManager,
    ) -> None:
        self._batch = batch
        self._steps = steps
        self._forwards = forwards
        self._device = manager.device
        self._size = manager.host.kv.page_size
        self._head = torch.arange(manager.device.heads, device=manager.device.device)
        self.rows = [self._rows(batch.slots[self._upload(list(step.runs))]) for step in steps]

    def to(self, tokens: Mapping[int, int]) -> Iterator[Return]:
        """How requests go back to the state after a token of their chain: ``{request: token}``."""
        groups = dict[tuple[int, bool], dict[int, int]]()
        for request, token in tokens.items():
            number = next(i for i, s in enumerate(self._steps) if token in s.runs.get(request, ()))
            fills = bool(self._batch.lengths[request, token] % self._size == 0)
            groups.setdefault((number, fills), {})[request] = token
        for (number, fills), group in groups.items():
            yield self._return(number, fills, group)

    def _return(self, number: int, fills: bool, tokens: Mapping[int, int]) -> Return:
        batch, step, size = self._batch, self._steps[number], self._size
        requests = list(tokens)
        ends = batch.lengths[requests, list(tokens.values())]
        index = self._upload(np.searchsorted(list(step.runs), requests))
        tails = batch.seq_lens_cpu[requests] // size
        # Until a page is filled, later tokens are only written behind the accepted ones.
        moved = (batch.longest[requests] // size > tails) & (ends % size > 0)
        rows = self._rows(batch.slots[self._upload(requests)])
        return Return(
            step=number,
            index=index,
            rows=self._rows(index),
            replays=self._replays(number, tokens),
            fills=fills,
            filled=self._upload(ends // size - 1).to(torch.int32),
            capacity=self._device.capacity[rows],
            host_page_table=batch.host_page_table[self._upload(requests)],
            tail_index=self._upload(np.where(moved, ends // size, -1)).to(torch.int32),
        )

    def _replays(
        self, number: int, tokens: Mapping[int, int]
    ) -> dict[int, tuple[Tensor, StepRows]]:
        step, forward = self._steps[number], self._forwards[number]
        wanted = np.zeros(len(step.pairs), dtype=bool)
        for request, token in tokens.items():
            first = step.first(request)
            wanted[first : first + token - step.runs[request].start + 1] = True
        replays = {}
        for part in (forward.whole, *forward.parts, *forward.dense_parts):
            of_part = wanted if part.index is None else wanted[part.index.cpu().numpy()]
            if of_part.any():
                index = self._upload(np.flatnonzero(of_part))
                replays[id(part.rows)] = (index, part.rows.take(index))
        return replays

    def _rows(self, slots: Tensor) -> Tensor:
        """``[m * H]``, the rows of request slots, or of requests by their index."""
        return (slots[:, None] * len(self._head) + self._head).flatten()

    def _upload(self, values: np.ndarray | list[int]) -> Tensor:
        array = np.asarray(values, dtype=np.int64)
        return torch.from_numpy(array).to(self._device.device)
