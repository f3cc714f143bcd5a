"""``lru_diff`` and the page tables of a decode step in one launch: checked entry point."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.checks import check_once, check_tensor
from hisparse.kernels.dispatch import implementation
from hisparse.kernels.row_state import DecodeRows, DiffTables, RowState

__all__ = ["diff_tables"]

_I32, _I64 = torch.int32, torch.int64


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
    ``lengths`` entries, attends its tail page alone. On a CPU the first is an error here, and the
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
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape, dtype or device, or, on a CPU, a row cannot be
            served.
    """
    tensors = (selection, lengths, *rows, *state)
    check_once(_check, *tensors, values=(width,))
    width = _width(selection, width)
    tail_below = width + 1 if tail_below is None else tail_below
    ops = implementation(impl, rows.rows.device)
    found: DiffTables = ops.diff_tables(
        selection, lengths, rows, state, page_size, width, tail_below
    )
    return found


def _width(selection: Tensor | None, width: int | None) -> int:
    if width is not None:
        return width
    assert selection is not None
    return selection.shape[1]


def _check(
    selection: Tensor | None,
    lengths: Tensor | None,
    rows: Tensor,
    capacity: Tensor,
    num_real_rows: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    tail_pages: Tensor,
    tail_lens: Tensor,
    dense: Tensor | None,
    malformed: Tensor | None,
    slot_pages: Tensor,
    lru_order: Tensor,
    device_pages: Tensor,
    page_slots: Tensor | None,
    width: int | None,
) -> None:
    device, count = rows.device, rows.shape[0]
    if (selection is None) != (lengths is None):
        raise KernelError("selection: got it without lengths or lengths without it, expected both")
    if selection is None and width is None:
        raise KernelError("width: got none without a selection, expected the most pages of a row")
    if selection is not None and lengths is not None:
        check_tensor("selection", selection, _I32, (count, None), device)
        check_tensor("lengths", lengths, _I32, (count,), device)
        if width is not None and width < selection.shape[1]:
            raise KernelError(f"width: got {width}, expected at least {selection.shape[1]}")
    check_tensor("rows", rows, _I64, (None,))
    check_tensor("capacity", capacity, _I32, (count,), device)
    check_tensor("num_real_rows", num_real_rows, _I32, (1,), device)
    check_tensor("host_page_table", host_page_table, _I32, (None, None), device)
    requests = host_page_table.shape[0]
    if (count % requests if requests else count) != 0:
        raise KernelError(
            f"host_page_table: got {requests} rows, expected a divisor of the {count} rows"
        )
    check_tensor("num_pages", num_pages, _I32, (requests,), device)
    check_tensor("tail_pages", tail_pages, _I32, (count,), device)
    check_tensor("tail_lens", tail_lens, _I32, (count,), device)
    if dense is not None:
        check_tensor("dense", dense, torch.bool, (requests,), device)
    if malformed is not None:
        check_tensor("malformed", malformed, _I64, (1,), device)
    check_tensor("slot_pages", slot_pages, _I32, (None, None), device)
    check_tensor("lru_order", lru_order, _I32, slot_pages.shape, device)
    check_tensor("device_pages", device_pages, _I32, slot_pages.shape, device)
    if page_slots is not None:
        check_tensor("page_slots", page_slots, _I32, (slot_pages.shape[0], None), device)
