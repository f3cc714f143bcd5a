"""Makes selected pages resident: finds the missing ones and loads them."""

from functools import partial

import torch
from torch import Tensor

from hisparse.algorithms import DecodeStep
from hisparse.cache.counters import Counters
from hisparse.cache.device_pool import DevicePool
from hisparse.cache.host_pool import HostKVPool
from hisparse.cache.kv_io import move_pages
from hisparse.cache.streams import Pending, SideStream
from hisparse.errors import HiSparseError, shorten
from hisparse.kernels import DecodeRows, DiffTables, diff_tables, verify_diff, verify_indices
from hisparse.types import Selection, StoredKV


class SwapIn:
    """Loads selected pages onto the device.

    Args:
        device: the device pages and the rows' tables.
        counters: counts hits and misses.
        aside: runs loads that no row waits for.
        checked: verify selections and resident bytes; waits for the device.
    """

    def __init__(
        self,
        host: HostKVPool,
        device: DevicePool,
        counters: Counters,
        aside: SideStream,
        *,
        checked: bool,
    ) -> None:
        self._host = host
        self._device = device
        self._counters = counters
        self._aside = aside
        self._checked = checked
        #: By layer, what :meth:`load_aside` has started.
        self._loading: dict[int, Pending[None]] = {}

    def swap_in(
        self,
        layer_id: int,
        step: DecodeStep,
        selection: Selection | None,
        *,
        width: int | None = None,
        tail_below: int | None = None,
        waits: bool = True,
    ) -> DiffTables:
        """Make the selected pages resident, or find those that were.

        Args:
            step: the requests that attend; its dense requests attend every page.
            selection: the selected pages; None: every page of every request.
            width: the most pages of a request; None: those of the selection, or of the contexts.
            tail_below: a full tail page is attended beside fewer pages than this; None: always.
            waits: whether the missing pages are loaded here. If not, they are away, to be attended
                in host memory, and :meth:`load_aside` has to load them.

        Returns:
            the device pages to attend, and what was loaded.
        """
        if self._checked and selection is not None:
            check_selection(layer_id, selection, step)
        tables = self.diff(layer_id, step, selection, width, tail_below, waits)
        if waits:
            self._gather(layer_id, tables, self._host.stored(layer_id))
        if tables.away is not None:
            self._counters.count("away_pages", tables.away)
        if self._checked:
            attended = selection or step.every_page(tables.loads.shape[1])
            check_resident(layer_id, attended, tables, step, self._host, self._device)
        return tables

    def load_aside(self, layer_id: int, tables: DiffTables) -> None:
        """Load what is away, beside the forward, into the device pages of what gave way to it.

        These are read by nobody before :meth:`finish_loading`, or the end of the forward.
        """
        load = partial(self._gather, layer_id, tables, self._host.stored(layer_id))
        self._loading[layer_id] = self._aside.start(load)

    def finish_loading(self, layer_id: int) -> None:
        """Let the forward wait for a layer's loads, if an earlier run of its tokens has any."""
        if (loading := self._loading.pop(layer_id, None)) is not None:
            loading.join()

    def diff(
        self,
        layer_id: int,
        step: DecodeStep,
        selection: Selection | None,
        width: int | None = None,
        tail_below: int | None = None,
        waits: bool = True,
    ) -> DiffTables:
        """Find the missing pages, and change the rows' tables as if they were loaded.

        Args:
            layer_id, step, selection, width, tail_below, waits: as in :meth:`swap_in`.
        """
        if selection is None:
            if width is None:
                # A context that fits has at most as many pages as the largest row.
                width = max(1, min(step.max_pages, self._device.max_row_pages))
            if self._device.device.type == "cpu":  # C++ takes a list; layers share it.
                selection = step.cache.once(("pages", width), lambda: step.every_page(width))
        selected = None if selection is None else Selection(*(x.flatten(0, 1) for x in selection))
        rows = step.rows._replace(tail_pages=step.tails(layer_id))
        tables = diff_tables(
            selected,
            rows,
            self._device.state(layer_id),
            page_size=self._host.kv.page_size,
            width=width,
            tail_below=tail_below,
            waits=waits,
        )
        if self._checked:
            verify_diff(tables.num_misses, selected, rows)
        return tables

    def _gather(self, layer_id: int, tables: DiffTables, source: StoredKV) -> None:
        """Copy the missing pages from ``source``."""
        pages, heads = tables.load_host_pages, self._device.heads
        if self._checked:
            verify_indices("src_pages", pages, -1, source.k.shape[0])
        move_pages(source, pages, self._device.stored(layer_id), tables.loads, heads=heads)

    def place(
        self, layer_id: int, slot: int, first: int, last: int, source: StoredKV, table: Tensor
    ) -> None:
        """Make pages ``first`` to ``last - 1`` of a request resident, the last one hottest.

        Args:
            slot: request slot; its rows' capacity is at least ``last - first``.
            first, last: page indices; the pages are not resident yet.
            source: the pool to read from.
            table: ``[last] int32``, page of ``source`` for each page index.
        """
        heads, device = self._device.heads, self._device.device
        rows = torch.arange(slot * heads, (slot + 1) * heads, device=device)
        pages = torch.arange(first, last, dtype=torch.int32, device=device)
        capacity = self._device.capacity[rows]
        # Numbers are filled in on the device: a copy from the host would wait for the device.
        tables = diff_tables(
            Selection(
                pages.expand(heads, -1).contiguous(), torch.full_like(capacity, last - first)
            ),
            DecodeRows(
                rows,
                capacity,
                num_real_rows=torch.full_like(capacity[:1], heads),
                host_page_table=table[None],
                num_pages=torch.full_like(capacity[:1], last),
                # Nothing is attended, so the tails do not matter.
                tail_pages=capacity,
                tail_lens=capacity,
            ),
            self._device.state(layer_id),
            page_size=self._host.kv.page_size,
        )
        self._gather(layer_id, tables, source)


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
    good &= (lengths <= pages.shape[-1])[..., None]
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
    tables: DiffTables,
    step: DecodeStep,
    host: HostKVPool,
    device: DevicePool,
) -> None:
    """Check that each attended page has the same bytes on the device and in host memory.

    Args:
        tables: the device page of each selected page that is not away.
        step: the requests that attend.
        host, device: the two pools.

    Raises:
        HiSparseError: a page differs; the message names the layer, the row and the page.
    """
    heads = step.policy.heads
    host_kv, device_kv = host.stored(layer_id), device.stored(layer_id)
    pages, table, away = selection.pages.flatten(0, 1), tables.attended, tables.away
    left_out = [0] * len(table)
    for row, entry in (pages >= 0).nonzero().tolist():
        page = int(pages[row, entry])
        host_page = int(step.host_page_table[row // heads, page])
        if away is not None and host_page in tables.load_host_pages[row, : away[row]]:
            left_out[row] += 1
            continue
        entry -= left_out[row]
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
