"""From slots of rows to device pages: checked entry points."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.checks import check_once, check_tensor
from hisparse.kernels.dispatch import implementation
from hisparse.kernels.row_state import LruDiff, PageTables, SelectionGuard

__all__ = ["page_table", "page_tables"]

_I32, _I64 = torch.int32, torch.int64


def page_table(device_pages: Tensor, rows: Tensor, slots: Tensor, *, impl: str = "auto") -> Tensor:
    """Look up the device pages behind slots.

    Args:
        device_pages: ``[NR, C] int32``, of the rows' state.
        rows: ``[R] int64``, state row of each row.
        slots: ``[R, K] int32``, -1 for none.
        impl: "auto", or an implementation's name.

    Returns:
        ``[R, K] int32``, -1 where ``slots`` is -1.

    Raises:
        KernelError: a tensor has another shape, dtype or device.
    """
    check_once(_check_slots, device_pages, rows, slots)
    table: Tensor = implementation(impl, slots.device).page_table(device_pages, rows, slots)
    return table


def page_tables(
    device_pages: Tensor,
    rows: Tensor,
    diff: LruDiff,
    lengths: Tensor,
    tail_pages: Tensor,
    *,
    guard: SelectionGuard | None = None,
    impl: str = "auto",
) -> PageTables:
    """Look up both page tables of a decode step in one launch: what to attend, where to load.

    Args:
        device_pages: ``[NR, C] int32``, of the rows' state.
        rows: ``[R] int64``, state row of each row.
        diff: what ``lru_diff`` found for the selection; its slots are ``[R, K] int32``.
        lengths: ``[R] int32``, 0 to K: the entry of ``attended`` that becomes the tail page.
        tail_pages: ``[R] int32``, device page of each row's tail.
        guard: counts rows whose selection was not ``lengths`` different pages, then nothing but
            -1, and rows that ``lru_diff`` refused. A GPU then attends the tail page alone in rows
            without a page at one of the first ``lengths`` entries. None: neither.
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape, dtype or device.
    """
    attended, loads = diff.curr_device_slots, diff.load_device_slots
    counts = (diff.num_hits, diff.num_misses)
    check_once(
        _check_diff, device_pages, rows, attended, loads, lengths, tail_pages, *counts, *guard or ()
    )
    module = implementation(impl, attended.device)
    tables: PageTables = module.page_tables(device_pages, rows, diff, lengths, tail_pages, guard)
    return tables


def _check_slots(device_pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    device, count = slots.device, rows.shape[0]
    check_tensor("device_pages", device_pages, _I32, (None, None), device)
    check_tensor("rows", rows, _I64, (count,), device)
    check_tensor("slots", slots, _I32, (count, None))


def _check_diff(
    device_pages: Tensor,
    rows: Tensor,
    attended: Tensor,
    loads: Tensor,
    lengths: Tensor,
    tail_pages: Tensor,
    num_hits: Tensor,
    num_misses: Tensor,
    num_real_rows: Tensor | None = None,
    malformed: Tensor | None = None,
) -> None:
    device, count = attended.device, rows.shape[0]
    check_tensor("device_pages", device_pages, _I32, (None, None), device)
    check_tensor("rows", rows, _I64, (count,), device)
    check_tensor("curr_device_slots", attended, _I32, (count, None))
    check_tensor("load_device_slots", loads, _I32, attended.shape, device)
    check_tensor("lengths", lengths, _I32, (count,), device)
    check_tensor("tail_pages", tail_pages, _I32, (count,), device)
    check_tensor("num_hits", num_hits, _I32, (count,), device)
    check_tensor("num_misses", num_misses, _I32, (count,), device)
    if num_real_rows is not None and malformed is not None:
        check_tensor("num_real_rows", num_real_rows, _I32, (1,), device)
        check_tensor("malformed", malformed, _I64, (1,), device)
