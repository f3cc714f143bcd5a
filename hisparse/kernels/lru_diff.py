"""Find resident pages, choose slots to evict, map misses to those slots: checked entry point."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.checks import check_once, check_tensor
from hisparse.kernels.dispatch import implementation
from hisparse.kernels.row_state import LruDiff, RowState

__all__ = ["lru_diff"]

_I32, _I64 = torch.int32, torch.int64


def lru_diff(
    selection: Tensor,
    host_page_table: Tensor,
    capacity: Tensor,
    num_real_rows: Tensor,
    state: RowState,
    *,
    rows: Tensor | None = None,
    num_pages: Tensor | None = None,
    out: LruDiff | None = None,
    impl: str = "auto",
) -> LruDiff:
    """Find the resident ones of the selected pages, and choose the slots to load the others to.

    The tables of ``state`` are updated in place: the order becomes survivors in their old order,
    then slots just loaded in load order, then hits in their old order. A CUDA kernel leaves a row
    that cannot be served as it is, with -1 misses; :func:`hisparse.kernels.verify_diff` reports
    such rows.

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
        out: tensors to write the result to; None: they are allocated.
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape, dtype or device, or there is no such
            implementation.
    """
    if rows is None:
        rows = _first_rows(selection, state)
    inputs = (selection, host_page_table, capacity, num_real_rows, *state, rows)
    check_once(_check, *inputs, num_pages, *(out or ()))
    ops = implementation(impl, selection.device)
    diff: LruDiff = ops.lru_diff(
        selection, host_page_table, capacity, num_real_rows, state, rows, out, num_pages
    )
    return diff


def _first_rows(selection: Tensor, state: RowState) -> Tensor:
    """One state row after the other."""
    count, held = len(selection), len(state.slot_pages)
    if count > held:
        raise KernelError(f"slot_pages: got {held} rows, expected {count} or more")
    return torch.arange(count, device=selection.device)


def _check(
    selection: Tensor,
    table: Tensor,
    capacity: Tensor,
    num_real_rows: Tensor,
    slot_pages: Tensor,
    lru_order: Tensor,
    device_pages: Tensor,
    page_slots: Tensor | None,
    rows: Tensor,
    num_pages: Tensor | None,
    *out: Tensor,
) -> None:
    device = selection.device
    check_tensor("selection", selection, _I32, (None, None))
    check_tensor("host_page_table", table, _I32, (None, None), device)
    num_rows, requests = selection.shape[0], table.shape[0]
    if (num_rows % requests if requests else num_rows) != 0:
        raise KernelError(
            f"host_page_table: got {requests} rows, expected a divisor of the selection's "
            f"{num_rows}"
        )
    check_tensor("capacity", capacity, _I32, (num_rows,), device)
    check_tensor("num_real_rows", num_real_rows, _I32, (1,), device)
    check_tensor("slot_pages", slot_pages, _I32, (None, None), device)
    tables = slot_pages.shape
    check_tensor("lru_order", lru_order, _I32, tables, device)
    check_tensor("device_pages", device_pages, _I32, tables, device)
    if page_slots is not None:
        check_tensor("page_slots", page_slots, _I32, (tables[0], None), device)
    check_tensor("rows", rows, _I64, (num_rows,), device)
    if num_pages is not None:
        check_tensor("num_pages", num_pages, _I32, (requests,), device)
    for name, tensor in zip(LruDiff._fields, out, strict=False):
        shape = selection.shape[:1] if name.startswith("num_") else selection.shape
        check_tensor(name, tensor, _I32, shape, device)
