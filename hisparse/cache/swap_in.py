"""Makes selected pages resident: finds the misses, loads them, returns the page table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.cache.checking import check_resident, check_selection
from hisparse.cache.codec import move_pages
from hisparse.cache.counters import Counters
from hisparse.cache.device_pool import DevicePool
from hisparse.cache.host_pool import HostKVPool
from hisparse.cache.rows import StepRows
from hisparse.cache.streams import Lane, Pending, SideStreams
from hisparse.kernels import (
    LruDiff,
    PageTables,
    SelectionGuard,
    lru_diff,
    page_table,
    page_tables,
    verify_diff,
    verify_indices,
)
from hisparse.types import Selection, StoredKV

__all__ = ["PageTable", "SwapIn"]


class PageTable(NamedTuple):
    """The device pages that each row attends over.

    Attributes:
        pages: ``[R, P] int32``, device pages, the tail page last; -1 behind it.
        seq_lens: ``[R] int32``, tokens; every page but the tail page is full.
    """

    pages: Tensor
    seq_lens: Tensor


#: Hits and misses, and the device pages of the selection, then the tail page.
_Loaded = tuple[LruDiff, PageTables]


class _Early(NamedTuple):
    """A swap-in that was started before its layer.

    Attributes:
        selection: the selected pages.
        loaded: result of the swap-in.
    """

    selection: Selection
    loaded: Pending[_Loaded]


class SwapIn:
    """Loads selected pages onto the device, at once or early on a side stream.

    Args:
        host: the whole KV cache.
        device: the device pages and the rows' tables.
        streams: side streams for early transfers.
        counters: counts hits, misses and prefetched pages.
        checked: verify selections and resident bytes; waits for the device.
        overlaps: whether :meth:`swap_in` also starts the transfers of later layers.
    """

    def __init__(
        self,
        host: HostKVPool,
        device: DevicePool,
        streams: SideStreams,
        counters: Counters,
        *,
        checked: bool,
        overlaps: bool,
    ) -> None:
        self._host = host
        self._device = device
        self._streams = streams
        self._counters = counters
        self._checked = checked
        self._overlaps = overlaps
        self._malformed = counters.total("malformed_selections")
        self._early: dict[int, _Early] = {}
        self._prefetches: dict[int, list[Pending[_Loaded]]] = {}

    def swap_in(
        self,
        layer_id: int,
        selection: Selection,
        rows: StepRows,
        tail_lens: Tensor,
        followers: Sequence[int] = (),
    ) -> PageTable:
        """Make the selected pages resident: ``SparseKVCacheManager.swap_in``."""
        if self._checked:
            check_selection(layer_id, selection, rows)
        self._join_prefetches(layer_id)
        early = self._early.get(layer_id)
        if early is not None and early.selection is selection:
            del self._early[layer_id]
            diff, tables = early.loaded.join()
        else:
            diff, tables = self._load(layer_id, selection, rows)
        if self._overlaps:
            for later in followers:
                # Both work on the LRU tables of that layer, on lanes without a common order.
                self._join_prefetches(later)
                self._early[later] = _Early(selection, self._start("read", later, selection, rows))
        self._counters.count("hit_pages", diff.num_hits)
        self._counters.count("miss_pages", diff.num_misses)
        if self._checked:
            pages = tables.attended[:, :-1]
            check_resident(layer_id, selection, pages, rows, self._host, self._device)
        seq_lens = torch.add(tail_lens, tables.lengths, alpha=self._host.kv.page_size)
        return PageTable(tables.attended, seq_lens)

    def prefetch(self, layer_id: int, selection: Selection, rows: StepRows) -> None:
        """Start loading pages for a layer that has not begun."""
        pending = self._start("early_read", layer_id, selection, rows)
        self._prefetches.setdefault(layer_id, []).append(pending)

    def join(self) -> None:
        """Join all early transfers; called at the end of a forward."""
        for layer_id in tuple(self._prefetches):
            self._join_prefetches(layer_id)
        self._early.clear()

    def _join_prefetches(self, layer_id: int) -> None:
        for pending in self._prefetches.pop(layer_id, ()):
            self._counters.count("prefetched_pages", pending.join()[0].num_misses)

    def _start(
        self, lane: Lane, layer_id: int, selection: Selection, rows: StepRows
    ) -> Pending[_Loaded]:
        return self._streams.start(lane, lambda: self._load(layer_id, selection, rows))

    def _load(self, layer_id: int, selection: Selection, rows: StepRows) -> _Loaded:
        """Load the missing pages of a selection."""
        state = self._device.state(layer_id)
        diff = lru_diff(
            selection.pages.reshape(rows.rows.numel(), -1),
            rows.host_page_table,
            rows.capacity,
            rows.num_real_rows,
            state,
            rows=rows.rows,
            num_pages=rows.num_pages,
        )
        if self._checked:
            verify_diff(diff, rows.capacity)
        tables = page_tables(
            state.device_pages,
            rows.rows,
            diff,
            selection.lengths.flatten(),
            rows.tail_pages[layer_id],
            guard=SelectionGuard(rows.num_real_rows, self._malformed),
        )
        self._gather(layer_id, diff, tables.loads, self._host.stored(layer_id))
        return diff, tables

    def _gather(self, layer_id: int, diff: LruDiff, loads: Tensor, source: StoredKV) -> None:
        """Copy pages ``diff.load_host_pages`` of ``source`` to device pages ``loads [R, K]``."""
        if self._checked:
            verify_indices("src_pages", diff.load_host_pages, -1, source.k.shape[0])
        move_pages(
            source,
            diff.load_host_pages,
            self._device.stored(layer_id),
            loads,
            heads=self._device.heads,
        )

    def place(
        self, layer_id: int, slot: int, first: int, last: int, source: StoredKV, table: Tensor
    ) -> None:
        """Make pages ``first`` to ``last - 1`` of a request resident, the last one hottest.

        Args:
            layer_id: layer number.
            slot: request slot; its rows' capacity is at least ``last - first``.
            first, last: page indices; the pages are not resident yet.
            source: the pool to read from.
            table: ``[last] int32``, page of ``source`` for each page index.
        """
        heads, device = self._device.heads, self._device.device
        rows = torch.arange(slot * heads, (slot + 1) * heads, device=device)
        pages = torch.arange(first, last, dtype=torch.int32, device=device)
        # Filled on the device: a copy from the host would synchronise with the device.
        num_real = torch.full((1,), heads, dtype=torch.int32, device=device)
        state = self._device.state(layer_id)
        capacity = self._device.capacity[rows]
        diff = lru_diff(
            pages.expand(heads, -1).contiguous(),
            table[None],
            capacity,
            num_real,
            state,
            rows=rows,
        )
        if self._checked:
            verify_diff(diff, capacity)
        loads = page_table(state.device_pages, rows, diff.load_device_slots)
        self._gather(layer_id, diff, loads, source)
