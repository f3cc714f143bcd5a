"""Makes selected pages resident: finds the misses, loads them, returns the page table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.algorithms import DecodeStep
from hisparse.cache.counters import Counters
from hisparse.cache.device_pool import DevicePool
from hisparse.cache.host_pool import HostKVPool
from hisparse.cache.kv_io import move_pages
from hisparse.cache.streams import Pending, SideStreams
from hisparse.errors import HiSparseError, shorten
from hisparse.kernels import (
    DecodeRows,
    DiffTables,
    diff_tables,
    verify_diff,
    verify_indices,
)
from hisparse.types import Selection, StoredKV


class PageTable(NamedTuple):
    """The device pages that each row attends over.

    Attributes:
        pages: ``[R, P] int32``, device pages, the tail page last, then -1.
        seq_lens: ``[R] int32``, tokens; every page but the tail page is full.
    """

    pages: Tensor
    seq_lens: Tensor


class Wanted(NamedTuple):
    """What to make resident in a layer: the arguments of :meth:`SwapIn.swap_in`."""

    step: DecodeStep
    selection: Selection | None
    width: int | None = None
    tail_below: int | None = None

    def of(self, step: DecodeStep) -> Wanted:
        """The same for ``step``, which was taken from this one."""
        chosen = self.selection
        if chosen is not None:
            chosen = Selection(chosen.pages[step.index], chosen.lengths[step.index])
        return self._replace(step=step, selection=chosen)


class _Early(NamedTuple):
    """A swap-in that was started before its layer.

    Attributes:
        selection: what it loads.
        loaded: its result.
    """

    selection: Selection | None
    loaded: Pending[DiffTables]


class SwapIn:
    """Loads selected pages onto the device, at once or early on a side stream.

    Args:
        host: the whole KV cache.
        device: the device pages and the rows' tables.
        streams: side streams for early transfers.
        counters: counts hits and misses.
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
        self._log: list[Wanted] | None = None

    def swap_in(
        self,
        layer_id: int,
        step: DecodeStep,
        selection: Selection | None,
        *,
        width: int | None = None,
        tail_below: int | None = None,
        followers: Sequence[int] = (),
    ) -> PageTable:
        """Make the selected pages resident, and return their device pages.

        Args:
            layer_id: layer number.
            step: the requests that attend; its dense requests attend every page.
            selection: the selected pages; None: every page of every request.
            width: the most pages of a request; None: those of the selection.
            tail_below: the tail page is attended beside fewer pages than this; None: always.
            followers: later layers that share the selection. With overlap, their transfers start
                here, after those of this layer.
        """
        wanted = Wanted(step, selection, width, tail_below)
        if self._checked and selection is not None:
            check_selection(layer_id, selection, step)
        early = self._early.get(layer_id)
        if early is not None and early.selection is selection:
            del self._early[layer_id]
            tables = early.loaded.join()
        else:
            tables = self._load(layer_id, wanted)
        if self._overlaps:
            for later in followers:
                self._early[later] = _Early(selection, self._start(later, wanted))
        self._counters.count_selected(layer_id, tables.num_hits, tables.num_misses)
        if self._checked:
            pages = tables.attended[:, :-1]
            attended = selection or step.every_page(pages.shape[1])
            check_resident(layer_id, attended, pages, step, self._host, self._device)
        return PageTable(tables.attended, tables.seq_lens)

    @contextmanager
    def logged(self) -> Iterator[list[Wanted]]:
        """Keep what is swapped in meanwhile, in order, for :meth:`replay`."""
        log: list[Wanted] = []
        self._log = log
        try:
            yield log
        finally:
            self._log = None

    def replay(self, layer_id: int, wanted: Wanted) -> None:
        """Change the rows' tables as :meth:`swap_in` does, and load no page."""
        self._find(layer_id, wanted, malformed=None)

    def discard_early(self) -> None:
        """Forget early transfers that no layer joined; called at the end of a forward."""
        self._early.clear()

    def _start(self, layer_id: int, wanted: Wanted) -> Pending[DiffTables]:
        return self._streams.start("read", lambda: self._load(layer_id, wanted))

    def _load(self, layer_id: int, wanted: Wanted) -> DiffTables:
        """Load the missing pages of a selection."""
        if self._log is not None:
            self._log.append(wanted)
        tables = self._find(layer_id, wanted, self._malformed)
        if self._checked:
            verify_diff(tables.num_misses, wanted.step.capacity)
        self._gather(layer_id, tables.load_host_pages, tables.loads, self._host.stored(layer_id))
        return tables

    def _find(self, layer_id: int, wanted: Wanted, malformed: Tensor | None) -> DiffTables:
        """What to attend and what to load; the rows' tables are those after the load."""
        step, selection, width, tail_below = wanted
        return diff_tables(
            None if selection is None else selection.pages.flatten(0, 1),
            None if selection is None else selection.lengths.flatten(),
            DecodeRows(
                step.rows,
                step.capacity,
                step.num_real_rows,
                step.host_page_table,
                step.num_pages,
                step.row_tails[layer_id],
                step.row_tail_lens,
                step.dense,
                malformed,
            ),
            self._device.state(layer_id),
            page_size=self._host.kv.page_size,
            width=width,
            tail_below=tail_below,
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
        # The last entry is the number of the request's pages.
        pages = torch.arange(first, last + 1, dtype=torch.int32, device=device)
        # Filled on the device: a copy from the host would synchronise with the device.
        num_real = torch.full((1,), heads, dtype=torch.int32, device=device)
        lengths = torch.full((heads,), last - first, dtype=torch.int32, device=device)
        capacity = self._device.capacity[rows]
        # Nothing is attended here, so any numbers stand for the tail pages.
        any_tails = (lengths, lengths)
        placed = diff_tables(
            pages[:-1].expand(heads, -1).contiguous(),
            lengths,
            DecodeRows(rows, capacity, num_real, table[None], pages[-1:], *any_tails),
            self._device.state(layer_id),
            page_size=self._host.kv.page_size,
        )
        if self._checked:
            verify_diff(placed.num_misses, capacity)
        self._gather(layer_id, placed.load_host_pages, placed.loads, source)


def check_selection(layer_id: int, selection: Selection, step: DecodeStep) -> None:
    """Check that pages are in range, ascending (so unique), and padded with -1 at the end.

    Raises:
        HiSparseError: a page is wrong; the message names the layer, the request and the pages.
    """
    pages, lengths = selection
    index = torch.arange(pages.shape[-1], device=pages.device)
    used = index < lengths[..., None]
    in_range = (pages >= 0) & (pages < step.num_pages[:, None, None])
    ascending = torch.ones_like(used)
    ascending[..., 1:] = (pages[..., 1:] > pages[..., :-1]) | ~used[..., 1:]
    good = torch.where(used, in_range & ascending, pages == -1)
    if not bool(good.all()):
        request, head, _ = (~good).nonzero()[0].tolist()
        got = shorten(pages[request, head].tolist())
        raise HiSparseError(
            f"layer {layer_id}, request {request}, head {head}: got a selection of pages "
            f"{got} with length {int(lengths[request, head])}, expected "
            f"ascending pages below {int(step.num_pages[request])}, then -1"
        )


def check_resident(
    layer_id: int,
    selection: Selection,
    table: Tensor,
    step: DecodeStep,
    host: HostKVPool,
    device: DevicePool,
) -> None:
    """Check that each selected page has the same bytes on the device and in host memory.

    Args:
        layer_id: layer number.
        selection: the selected pages.
        table: ``[R, K] int32``, the device page of each selected page.
        step: the requests that attend.
        host, device: the two pools.

    Raises:
        HiSparseError: a page differs; the message names the layer, the row and the page.
    """
    heads = step.policy.heads
    host_kv, device_kv = host.stored(layer_id), device.stored(layer_id)
    pages = selection.pages.reshape(table.shape)
    for row, entry in (pages >= 0).nonzero().tolist():
        page = int(pages[row, entry])
        host_page = int(step.host_page_table[row // heads, page])
        head = slice(None) if heads == 1 else [row % heads * host.kv.num_kv_heads // heads]
        on_device = (x[int(table[row, entry])].to("cpu") for x in device_kv.tensors)
        on_host = (x[host_page, head] for x in host_kv.tensors)
        decoded = (host.format.decode(StoredKV(*each)) for each in (on_device, on_host))
        for got, expected in zip(*decoded, strict=True):
            if torch.equal(got, expected):
                continue
            largest = expected.float().abs().max()
            error = float((got.float() - expected.float()).abs().max() / largest)
            raise HiSparseError(
                f"layer {layer_id}, row {row}: page {page} on the device (page "
                f"{int(table[row, entry])}) differs from host page {host_page} by {error:.1e} of "
                "its largest value, expected equal values"
            )
