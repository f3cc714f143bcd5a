"""Makes selected pages resident: finds the misses, loads them, returns the page table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.cache.checking import check_resident, check_selection
from hisparse.cache.counters import Counters
from hisparse.cache.device_pool import DevicePool
from hisparse.cache.host_pool import HostKVPool
from hisparse.cache.kv_io import move_pages
from hisparse.cache.rows import StepRows
from hisparse.cache.streams import Lane, Pending, SideStreams
from hisparse.kernels import (
    DiffTables,
    diff_tables,
    lru_diff,
    page_table,
    verify_diff,
    verify_indices,
)
from hisparse.types import Selection, StoredKV

__all__ = ["PageTable", "Selected", "SwapIn", "SwapInLog"]


class PageTable(NamedTuple):
    """The device pages that each row attends over.

    Attributes:
        pages: ``[R, P] int32``, device pages, the tail page last; -1 behind it.
        seq_lens: ``[R] int32``, tokens; every page but the tail page is full.
    """

    pages: Tensor
    seq_lens: Tensor


class Selected(NamedTuple):
    """What a part of a step attends over.

    Attributes:
        selection: the selected pages; None: every page of every request.
        dense: ``[B] bool``, requests that attend every page besides; None: no request does.
        max_pages: the most pages of a request; None: those of the selection.
        tail_below: the tail page is attended beside fewer pages than this; None: always.
    """

    selection: Selection | None
    dense: Tensor | None = None
    max_pages: int | None = None
    tail_below: int | None = None

    def take(self, index: Tensor) -> Selected:
        """The same for the requests ``index [n] int64``."""
        found, dense = self.selection, self.dense
        return self._replace(
            selection=found and Selection(found.pages[index], found.lengths[index]),
            dense=None if dense is None else dense[index],
        )


#: What was swapped in, and the rows, in order.
SwapInLog = list[tuple[Selected, StepRows]]


class _Early(NamedTuple):
    """A swap-in that was started before its layer.

    Attributes:
        selected: what it loads.
        loaded: its result.
    """

    selected: Selected
    loaded: Pending[DiffTables]


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
        self._prefetches: dict[int, list[Pending[DiffTables]]] = {}
        self._log: SwapInLog | None = None

    def swap_in(
        self,
        layer_id: int,
        selected: Selected,
        rows: StepRows,
        followers: Sequence[int] = (),
    ) -> PageTable:
        """Make the selected pages resident: ``SparseKVCacheManager.swap_in``."""
        if self._checked and selected.selection is not None:
            check_selection(layer_id, selected.selection, rows)
        self._join_prefetches(layer_id)
        early = self._early.get(layer_id)
        if early is not None and early.selected.selection is selected.selection:
            del self._early[layer_id]
            tables = early.loaded.join()
        else:
            tables = self._load(layer_id, selected, rows)
        if self._overlaps:
            for later in followers:
                # Both work on the LRU tables of that layer, on lanes without a common order.
                self._join_prefetches(later)
                self._early[later] = _Early(selected, self._start("read", later, selected, rows))
        self._counters.count_selected(layer_id, tables.num_hits, tables.num_misses)
        if self._checked:
            pages = tables.attended[:, :-1]
            selection = selected.selection or rows.every_page(pages.shape[1])
            check_resident(layer_id, selection, pages, rows, self._host, self._device)
        return PageTable(tables.attended, tables.seq_lens)

    def prefetch(self, layer_id: int, selection: Selection, rows: StepRows) -> None:
        """Start loading pages for a layer that has not begun."""
        pending = self._start("early_read", layer_id, Selected(selection), rows)
        self._prefetches.setdefault(layer_id, []).append(pending)

    @contextmanager
    def logged(self) -> Iterator[SwapInLog]:
        """Keep what is swapped in meanwhile, for :meth:`replay`."""
        log: SwapInLog = []
        self._log = log
        try:
            yield log
        finally:
            self._log = None

    def replay(self, layer_id: int, selected: Selected, rows: StepRows) -> None:
        """Change the rows' tables as :meth:`swap_in` does, and load no page."""
        self._find(layer_id, selected, rows, malformed=None)

    def join(self) -> None:
        """Join all early transfers; called at the end of a forward."""
        for layer_id in tuple(self._prefetches):
            self._join_prefetches(layer_id)
        self._early.clear()

    def _join_prefetches(self, layer_id: int) -> None:
        for pending in self._prefetches.pop(layer_id, ()):
            self._counters.count("prefetched_pages", pending.join().num_misses)

    def _start(
        self, lane: Lane, layer_id: int, selected: Selected, rows: StepRows
    ) -> Pending[DiffTables]:
        return self._streams.start(lane, lambda: self._load(layer_id, selected, rows))

    def _load(self, layer_id: int, selected: Selected, rows: StepRows) -> DiffTables:
        """Load the missing pages of a selection."""
        if self._log is not None:
            self._log.append((selected, rows))
        tables = self._find(layer_id, selected, rows, self._malformed)
        if self._checked:
            verify_diff(tables.num_misses, rows.capacity)
        self._gather(layer_id, tables.load_host_pages, tables.loads, self._host.stored(layer_id))
        return tables

    def _find(
        self, layer_id: int, selected: Selected, rows: StepRows, malformed: Tensor | None
    ) -> DiffTables:
        """What to attend and what to load; the rows' tables are those after the load."""
        selection = selected.selection
        return diff_tables(
            None if selection is None else selection.pages.flatten(0, 1),
            None if selection is None else selection.lengths.flatten(),
            rows.of_layer(layer_id, dense=selected.dense, malformed=malformed),
            self._device.state(layer_id),
            page_size=self._host.kv.page_size,
            width=selected.max_pages,
            tail_below=selected.tail_below,
        )

    def _gather(self, layer_id: int, pages: Tensor, loads: Tensor, source: StoredKV) -> None:
        """Copy ``pages [R, K]`` of ``source`` to device pages ``loads [R, K]``."""
        if self._checked:
            verify_indices("src_pages", pages, -1, source.k.shape[0])
        move_pages(source, pages, self._device.stored(layer_id), loads, heads=self._device.heads)

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
            verify_diff(diff.num_misses, capacity)
        loads = page_table(state.device_pages, rows, diff.load_device_slots)
        self._gather(layer_id, diff.load_host_pages, loads, source)
