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
from hisparse.types import Selection

__all__ = [
    "DecodeRows",
    "DiffTables",
    "RowState",
    "diff_tables",
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


class DecodeRows(NamedTuple):
    """The rows of a decode step in one layer; row ``r`` belongs to request ``r // (R // T)``.

    Attributes:
        rows: ``[R] int64``, state row of each row. Requests with the same state rows follow each
            other, and are served in that order. On CUDA no row stands twice.
        capacity: ``[R] int32``, slots of each row, at least the unique pages of its selection.
        num_real_rows: ``[1] int32``; rows from there on are padding.
        host_page_table: ``[T, Pmax] int32``, host page of each page index.
        num_pages: ``[T] int32``, full pages of each request; a selection names no others.
        tail_pages: ``[R] int32``, device page of each row's tail.
        tail_lens: ``[R] int32``, tokens in the tail page.
        dense: ``[T] bool``, requests that attend every page, whatever is selected for them; None:
            no request does.
        counts: ``[3] int64``, to which hits, misses and malformed rows are added: those whose
            selection is not ``lengths`` different pages, then nothing but -1, and those that cannot
            be served. Padding does not count. None: nothing is counted.
    """

    rows: Tensor
    capacity: Tensor
    num_real_rows: Tensor
    host_page_table: Tensor
    num_pages: Tensor
    tail_pages: Tensor
    tail_lens: Tensor
    dense: Tensor | None = None
    counts: Tensor | None = None

    def slots_in(self, tails: Tensor, page_size: int) -> Tensor:
        """Where new tokens go: device pages ``[..., R] int32`` times S, plus offset, int64."""
        return torch.add(self.tail_lens.long() - 1, tails, alpha=page_size)

    @staticmethod
    def table_pages(num_pages: int) -> int:
        """For how many full pages a table of at least ``num_pages`` has room.

        At most a sixteenth more, so that most steps have the shapes of the step before, which
        recorded layers and PyTorch's allocator for CUDA reuse.
        """
        unit = max(1, 1 << num_pages.bit_length() >> 5)
        return -(-num_pages // unit) * unit


class DiffTables(NamedTuple):
    """What to attend and what to load; -1 padded.

    Attributes:
        attended: ``[R, K + 1] int32``, device page of each selected page, then the row's tail page.
        seq_lens: ``[R] int32``, tokens to attend; every page but the tail page is full.
        loads: ``[R, K] int32``, device page that each miss is copied to.
        load_host_pages: ``[R, K] int32``, host pages of the misses, in order of first occurrence.
        num_hits: ``[R] int32``, unique pages that were resident.
        num_misses: ``[R] int32``, unique pages that were not; -1 in rows that cannot be served.
        away: ``[R] int32``, misses that the row does not wait for: ``num_misses``, -1 included, and
            ``attended`` leaves them out. None if rows wait.
    """

    attended: Tensor
    seq_lens: Tensor
    loads: Tensor
    load_host_pages: Tensor
    num_hits: Tensor
    num_misses: Tensor
    away: Tensor | None = None


def tables(rows: str, *, pages_move: bool) -> tuple[Arg, ...]:
    """Arguments of a :class:`RowState`.

    Args:
        rows: "NR", or "L NR" with a dimension of layers.
        pages_move: whether the operation writes ``device_pages``.
    """
    layout: Literal["any", "rows"] = "any" if pages_move else "rows"
    return (
        Arg("slot_pages", f"{rows} C", _I32, written=True, layout="any"),
        Arg("lru_order", f"{rows} C", _I32, written=True, layout="any"),
        Arg("device_pages", f"{rows} C", _I32, written=pages_move, layout=layout),
        Arg("page_slots", f"{rows} _", _I32, optional=True, written=True, layout="any"),
    )


def _selection_fits(tensors: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    selection, width = tensors["selection"], sizes["width"]
    if selection is None and width is None:
        raise KernelError("width: got none without a selection, expected the most pages of a row")
    if width is not None and width < (least := 0 if selection is None else selection.shape[1]):
        raise KernelError(f"width: got {width}, expected at least {least}")
    rows, requests = sizes["R"], sizes["T"]
    if (rows % requests if requests else rows) != 0:
        raise KernelError(
            f"host_page_table: got {requests} rows, expected a divisor of the selection's {rows}"
        )


def _scratch(state: RowState, rows: Tensor, width: int) -> Tensor:
    """``[R, bytes] uint8``; no bytes where shared memory is enough."""
    num_bytes = call_cuda("diff_tables_scratch_bytes", state.slot_pages, width)
    return rows.new_empty((rows.shape[0], num_bytes), dtype=torch.uint8)


def with_dense_requests(
    selection: Selection | None, rows: DecodeRows, width: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Write every page into the selections of dense requests.

    Args:
        selection: pages ``[R, K]`` and lengths ``[R]``; None: all requests are dense.
        rows: the requests' rows.
        width: pages of the result, at least K.

    Returns:
        the selection ``[R, width] int32``, its lengths ``[R] int32``, and ``[R] bool``, rows of
        dense requests; None: there are none.
    """
    if selection is not None and selection.pages.shape[1] < width:
        pages = pad(selection.pages, (0, width - selection.pages.shape[1]), value=-1)
        selection = selection._replace(pages=pages)
    if selection is not None and rows.dense is None:
        return *selection, None
    heads = rows.rows.shape[0] // max(rows.num_pages.shape[0], 1)
    num_pages = rows.num_pages.repeat_interleave(heads)
    page = torch.arange(width, dtype=torch.int32, device=num_pages.device)
    every_page = torch.where(page < num_pages[:, None], page, -1)
    if selection is None or rows.dense is None:
        return every_page, num_pages, torch.ones_like(num_pages, dtype=torch.bool)
    dense = rows.dense.repeat_interleave(heads)
    pages = torch.where(dense[:, None], every_page, selection.pages)
    return pages, torch.where(dense, num_pages, selection.lengths), dense


def _tables_on_cpu(
    call: Callable[..., Any],
    selection: Selection | None,
    rows: DecodeRows,
    state: RowState,
    page_size: int,
    width: int,
    tail_below: int,
    waits: bool,
) -> Any:
    """A row that lacks a page keeps its length: attention refuses the -1."""
    # C++ takes `dense` by row.
    pages, lengths, dense = with_dense_requests(selection, rows, width)
    tensors = (pages, lengths, *rows[:7], dense, rows.counts, *state)
    return call(*tensors, page_size, tail_below, waits, width)


DIFF_TABLES = Operation(
    __name__,
    "diff_tables",
    Arg("selection", "R _", _I32, optional=True),
    Arg("lengths", "R", _I32, optional=True),
    Arg("rows", "R", _I64),
    Arg("capacity", "R", _I32),
    Arg("num_real_rows", "1", _I32),
    Arg("host_page_table", "T Pmax", _I32),
    Arg("num_pages", "T", _I32),
    Arg("tail_pages", "R", _I32),
    Arg("tail_lens", "R", _I32),
    Arg("dense", "T", torch.bool, optional=True),
    Arg("counts", "3", _I64, optional=True, written=True, layout="any"),
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
    cuda=lambda call, selection, rows, state, page_size, width, tail_below, waits: call(
        *(selection or (None, None)),
        *rows,
        *state,
        _scratch(state, rows.rows, width),
        page_size,
        tail_below,
        waits,
        width,
    ),
    sizes=("K",),
    also=_selection_fits,
)


def diff_tables(
    selection: Selection | None,
    rows: DecodeRows,
    state: RowState,
    *,
    page_size: int,
    width: int | None = None,
    tail_below: int | None = None,
    waits: bool = True,
    impl: str = "auto",
) -> DiffTables:
    """Find the resident ones of the selected pages, and choose the slots to load the others to.

    The tables of ``state`` are updated in place: the order becomes survivors in their old order,
    then slots just loaded in load order, then hits in their old order.

    A row cannot be served if it has more unique pages than capacity, a page beyond its request's,
    or a state row or slot that does not exist. On a CPU that is an error; on a GPU the row has -1
    misses, which :func:`hisparse.kernels.verify_diff` reports, attends only its tail page, and its
    tables stay. A row that lacks a page at one of the first ``lengths`` entries attends only its
    tail page on a GPU too, and is an error of attention on a CPU.

    A row that does not wait attends what was resident before; its misses are *away*, to be attended
    in host memory while they are loaded.

    Args:
        selection: pages ``[R, n]``, -1 padded, and lengths ``[R]``; None: every page of every
            request.
        rows: the rows, and what is known of their requests.
        state: tables of the layer.
        page_size: S, tokens.
        width: K, entries of the results, at least n; None: n. Dense requests have at most K pages.
        tail_below: a full tail page is attended only beside fewer pages than this, and in dense
            requests; None: always.
        waits: whether rows wait for their misses; rows that stand here more than once have to.
    """
    chosen = (None, None) if selection is None else selection
    run = DIFF_TABLES(impl, *chosen, *rows, *state, values=(width,))
    if width is None:
        assert selection is not None, "checked"
        width = selection.pages.shape[1]
    tail_below = width + 1 if tail_below is None else tail_below
    found = DiffTables(*run(selection, rows, state, page_size, width, tail_below, waits))
    return found if waits else found._replace(away=found.num_misses)


def verify_diff(num_misses: Tensor, selection: Selection | None, rows: DecodeRows) -> None:
    """Raise ``KernelError`` if :func:`diff_tables` refused a row.

    Args:
        num_misses: ``[R] int32``, as returned; -1 for a refused row.
        selection, rows: as given.
    """
    refused = (num_misses < 0).nonzero().flatten().tolist()
    if not refused:
        return
    row = refused[0]
    request = row * len(rows.num_pages) // len(rows.rows)
    count, capacity = int(rows.num_pages[request]), int(rows.capacity[row])
    pages = set(range(count) if selection is None else selection.pages[row].tolist()) - {-1}
    fault = f"state row {int(rows.rows[row])}, expected one that has {capacity} slots"
    if max(pages, default=-1) >= count:
        fault = f"page {max(pages)}, expected -1 to {count - 1}"
    elif len(pages) > capacity:
        fault = f"{len(pages)} pages, expected at most its capacity, {capacity}"
    raise KernelError(f"selection: got in row {row} {fault}")
