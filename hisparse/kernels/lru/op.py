"""Which selected pages are resident, what gives way to the others, and the step's page tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hisparse.errors import KernelError
from hisparse.kernels.arguments import Arg, Result
from hisparse.kernels.build.cuda import call_cuda
from hisparse.kernels.operation import Operation

__all__ = [
    "DecodeRows",
    "DiffTables",
    "LruDiff",
    "RowState",
    "diff_tables",
    "lru_diff",
    "verify_diff",
]

_I32, _I64 = torch.int32, torch.int64


class RowState(NamedTuple):
    """Tables of one layer's rows: NR state rows of C slots each.

    Attributes:
        slot_pages: ``[NR, C] int32``, page index in the sequence that a slot holds, -1 if empty.
        lru_order: ``[NR, C] int32``, slots from cold to hot; -1 from the row's capacity on.
        device_pages: ``[NR, C] int32``, device page of a slot; -1 from the capacity on.
        page_slots: ``[NR, Pmax] int32``, where CUDA's operations look for a page: the slot of every
            resident page; entries of other pages mean nothing. None on a CPU, whose operations
            search ``slot_pages``.
    """

    slot_pages: Tensor
    lru_order: Tensor
    device_pages: Tensor
    page_slots: Tensor | None = None

    def layer(self, layer_id: int) -> RowState:
        """One layer of tables ``[L, NR, ...]``."""
        held, order, pages, index = self
        each = (held[layer_id], order[layer_id], pages[layer_id])
        return RowState(*each, None if index is None else index[layer_id])


class LruDiff(NamedTuple):
    """Hits, misses and loads of one step; int32, -1 padded.

    Attributes:
        curr_device_slots: ``[R, K]``, row-local slot of each selected page, hit or miss.
        load_host_pages: ``[R, K]``, host pages of the misses, in order of first occurrence.
        load_device_slots: ``[R, K]``, row-local slot that each miss is loaded to.
        num_hits: ``[R]``, unique pages that were resident.
        num_misses: ``[R]``, unique pages that were not.
    """

    curr_device_slots: Tensor
    load_host_pages: Tensor
    load_device_slots: Tensor
    num_hits: Tensor
    num_misses: Tensor


class DecodeRows(NamedTuple):
    """The rows of a decode step in one layer; row ``r`` belongs to request ``r // (R // T)``.

    Attributes:
        rows: ``[R] int64``, state row of each row; twice as in :func:`hisparse.kernels.lru_diff`.
        capacity: ``[R] int32``, slots of each row.
        num_real_rows: ``[1] int32``; rows from there on are padding.
        host_page_table: ``[T, Pmax] int32``, host page of each page index.
        num_pages: ``[T] int32``, full pages of each request; a selection names no others.
        tail_pages: ``[R] int32``, device page of each row's tail.
        tail_lens: ``[R] int32``, tokens in the tail page.
        dense: ``[T] bool``, requests that attend every page, whatever is selected for them; None:
            no request does.
        malformed: ``[1] int64``, counts real rows whose selection is not ``lengths`` different
            pages, then nothing but -1, and rows that cannot be served; None: they are not counted.
    """

    rows: Tensor
    capacity: Tensor
    num_real_rows: Tensor
    host_page_table: Tensor
    num_pages: Tensor
    tail_pages: Tensor
    tail_lens: Tensor
    dense: Tensor | None = None
    malformed: Tensor | None = None


class DiffTables(NamedTuple):
    """What to attend and what to load; int32, -1 padded.

    Attributes:
        attended: ``[R, K + 1]``, device page of each selected page, then the row's tail page.
        seq_lens: ``[R]``, tokens to attend; every page but the tail page is full.
        loads: ``[R, K]``, device page that each miss is copied to.
        load_host_pages: ``[R, K]``, host pages of the misses, in order of first occurrence.
        num_hits: ``[R]``, unique pages that were resident.
        num_misses: ``[R]``, unique pages that were not; -1 in rows that cannot be served.
    """

    attended: Tensor
    seq_lens: Tensor
    loads: Tensor
    load_host_pages: Tensor
    num_hits: Tensor
    num_misses: Tensor


def tables(rows: str, *, pages_move: bool) -> tuple[Arg, ...]:
    """Arguments of a :class:`RowState`.

    Args:
        rows: "NR", or "L NR" with a dimension of layers.
        pages_move: whether the operation writes ``device_pages``.
    """
    layout: Literal["any", "rows"] = "any" if pages_move else "rows"
    return (
        Arg("slot_pages", _I32, f"{rows} C", written=True, layout="any"),
        Arg("lru_order", _I32, f"{rows} C", written=True, layout="any"),
        Arg("device_pages", _I32, f"{rows} C", written=pages_move, layout=layout),
        Arg("page_slots", _I32, f"{rows} _", optional=True, written=True, layout="any"),
    )


def _rows_share_tables(tensors: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    rows, requests = sizes["R"], sizes["T"]
    if (rows % requests if requests else rows) != 0:
        raise KernelError(
            f"host_page_table: got {requests} rows, expected a divisor of the selection's {rows}"
        )


def _selection_fits(tensors: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    selection, width = tensors["selection"], sizes["width"]
    if (selection is None) != (tensors["lengths"] is None):
        raise KernelError("selection: got it without lengths or lengths without it, expected both")
    if selection is None and width is None:
        raise KernelError("width: got none without a selection, expected the most pages of a row")
    if selection is not None and width is not None and width < selection.shape[1]:
        raise KernelError(f"width: got {width}, expected at least {selection.shape[1]}")
    _rows_share_tables(tensors, sizes)


def _scratch(state: RowState, rows: Tensor, width: int) -> Tensor:
    """``[R, bytes] uint8``; no bytes where shared memory is enough."""
    num_bytes = call_cuda("lru_diff_scratch_bytes", state.slot_pages, width)
    return rows.new_empty((rows.shape[0], num_bytes), dtype=torch.uint8)


def _diff_on_cuda(call: Callable[..., Any], selection: Tensor, *tensors: Any) -> Any:
    *_, state, rows, _ = tensors
    return call(selection, *tensors, _scratch(state, rows, selection.shape[1]))


def with_dense_requests(
    selection: Tensor | None, lengths: Tensor | None, rows: DecodeRows, width: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Write every page into the selections of dense requests.

    Returns:
        the selection ``[R, width]``, its lengths ``[R]``, and ``[R] bool``, rows of dense requests;
        None: there are none.
    """
    if selection is not None and selection.shape[1] < width:
        selection = pad(selection, (0, width - selection.shape[1]), value=-1)
    if selection is not None and lengths is not None and rows.dense is None:
        return selection, lengths, None
    heads = rows.rows.shape[0] // max(len(rows.num_pages), 1)
    num_pages = rows.num_pages.repeat_interleave(heads)
    page = torch.arange(width, dtype=torch.int32, device=num_pages.device)
    every_page = torch.where(page < num_pages[:, None], page, -1)
    if selection is None or lengths is None or rows.dense is None:
        return every_page, num_pages, torch.ones_like(num_pages, dtype=torch.bool)
    dense = rows.dense.repeat_interleave(heads)
    selection = torch.where(dense[:, None], every_page, selection)
    return selection, torch.where(dense, num_pages, lengths), dense


def _tables_on_cpu(
    call: Callable[..., Any],
    selection: Tensor | None,
    lengths: Tensor | None,
    rows: DecodeRows,
    state: RowState,
    page_size: int,
    width: int,
    tail_below: int,
) -> Any:
    """A row that lacks a page keeps its length: attention refuses the -1."""
    # C++ takes `dense` by row.
    selection, lengths, dense = with_dense_requests(selection, lengths, rows, width)
    tensors = (selection, lengths, rows[:7], dense, rows.malformed, state)
    return call(*tensors, page_size, tail_below, width)


LRU_DIFF = Operation(
    __name__,
    "lru_diff",
    Arg("selection", _I32, "R K"),
    Arg("host_page_table", _I32, "T Pmax"),
    Arg("capacity", _I32, "R"),
    Arg("num_real_rows", _I32, "1"),
    *tables("NR", pages_move=False),
    Arg("rows", _I64, "R"),
    Arg("num_pages", _I32, "T", optional=True),
    results=(  # Of `LruDiff`, in order.
        Result(_I32, "R K"),
        Result(_I32, "R K"),
        Result(_I32, "R K"),
        Result(_I32, "R"),
        Result(_I32, "R"),
    ),
    cpu=True,
    cuda=_diff_on_cuda,
    also=_rows_share_tables,
)
DIFF_TABLES = Operation(
    __name__,
    "diff_tables",
    Arg("selection", _I32, "R _", optional=True),
    Arg("lengths", _I32, "R", optional=True),
    Arg("rows", _I64, "R"),
    Arg("capacity", _I32, "R"),
    Arg("num_real_rows", _I32, "1"),
    Arg("host_page_table", _I32, "T Pmax"),
    Arg("num_pages", _I32, "T"),
    Arg("tail_pages", _I32, "R"),
    Arg("tail_lens", _I32, "R"),
    Arg("dense", torch.bool, "T", optional=True),
    Arg("malformed", _I64, "1", optional=True, written=True, layout="any"),
    *tables("NR", pages_move=False),
    results=(  # Of `DiffTables`, in order.
        Result(_I32, "R K+1"),
        Result(_I32, "R"),
        Result(_I32, "R K"),
        Result(_I32, "R K"),
        Result(_I32, "R"),
        Result(_I32, "R"),
    ),
    on="rows",
    values=("width",),
    cpu=_tables_on_cpu,
    cuda=lambda call, selection, lengths, rows, state, page_size, width, tail_below: call(
        selection,
        lengths,
        rows,
        state,
        _scratch(state, rows.rows, width),
        page_size,
        tail_below,
        width,
    ),
    sizes=("K",),
    also=_selection_fits,
)


def lru_diff(
    selection: Tensor,
    host_page_table: Tensor,
    capacity: Tensor,
    num_real_rows: Tensor,
    state: RowState,
    *,
    rows: Tensor | None = None,
    num_pages: Tensor | None = None,
    impl: str = "auto",
) -> LruDiff:
    """Find the resident ones of the selected pages, and choose the slots to load the others to.

    This is the first half of :func:`diff_tables`. The engine calls only that; this one is for tests
    and for ``hisparse bench lru-diff``.

    The tables of ``state`` are updated in place: the order becomes survivors in their old order,
    then slots just loaded in load order, then hits in their old order.

    A row cannot be served if it has more unique pages than capacity, a page beyond its limit, or a
    state row or slot that does not exist. C++ raises; CUDA leaves its tables as they are, with -1
    as its entries, 0 hits and -1 misses. :func:`hisparse.kernels.verify_diff` reports such rows.

    Args:
        selection: ``[R, K] int32``, page indices; -1 and duplicates may stand anywhere.
        host_page_table: ``[T, Pmax] int32``, host page of each page index; R is a multiple of T
            and row r uses table row ``r // (R // T)``, so that heads share a request's table.
        capacity: ``[R] int32``, slots of each row, at least the unique pages of its selection.
        num_real_rows: ``[1] int32``; rows from there on are padding: -1 out, nothing changed.
        state: tables of the layer.
        rows: ``[R] int64``, state row of each row; the first R state rows if None. Requests with
            the same state rows follow each other, and are served in that order. On CUDA no row
            stands twice.
        num_pages: ``[T] int32``, pages of each request; a row that selects others cannot be
            served. None: Pmax for each.
    """
    if rows is None:
        count, held = len(selection), len(state.slot_pages)
        if count > held:
            raise KernelError(f"slot_pages: got {held} rows, expected {count} or more")
        rows = torch.arange(count, device=selection.device)
    tensors = (selection, host_page_table, capacity, num_real_rows, *state, rows, num_pages)
    run = LRU_DIFF(impl, *tensors)
    return LruDiff(*run(*tensors[:4], state, rows, num_pages))


def diff_tables(
    selection: Tensor | None,
    lengths: Tensor | None,
    rows: DecodeRows,
    state: RowState,
    *,
    page_size: int,
    width: int | None = None,
    tail_below: int | None = None,
    impl: str = "auto",
) -> DiffTables:
    """:func:`hisparse.kernels.lru_diff`, and the device pages to attend and to load.

    On a GPU, a row whose selection cannot be served, or lacks a page at one of the first
    ``lengths`` entries, attends only its tail page. On a CPU the first is an error here, and the
    second one in attention.

    Args:
        selection: ``[R, n] int32``, selected pages, -1 padded; None: every page of every request.
        lengths: ``[R] int32``, pages of each selection; None with ``selection``.
        rows: the rows, and what is known of their requests.
        state: tables of the layer.
        page_size: S, tokens.
        width: K, entries of the results, at least n; None: n. Dense requests have at most K pages.
        tail_below: the tail page is attended only beside fewer pages than this, and in dense
            requests; None: always.

    Raises:
        KernelError: on a CPU, a row cannot be served.
    """
    run = DIFF_TABLES(impl, selection, lengths, *rows, *state, values=(width,))
    if width is None:
        assert selection is not None, "checked"
        width = selection.shape[1]
    tail_below = width + 1 if tail_below is None else tail_below
    return DiffTables(*run(selection, lengths, rows, state, page_size, width, tail_below))


def verify_diff(num_misses: Tensor, capacity: Tensor) -> None:
    """Raise ``KernelError`` if ``lru_diff`` or ``diff_tables`` refused a row.

    Args:
        num_misses: ``[R] int32``, as returned; -1 for a refused row.
        capacity: ``[R] int32``, as given.
    """
    refused = (num_misses < 0).nonzero().flatten().tolist()
    if refused:
        row = refused[0]
        raise KernelError(
            f"selection: row {row} cannot be served, expected pages of the host page table, no "
            f"more of them than its capacity {int(capacity[row])}, and a state row with such slots"
        )
