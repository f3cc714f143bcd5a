"""Changes to rows outside ``lru_diff``, for capacity, reuse and full tail pages: entry points."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.checks import check_once, check_tensor
from hisparse.kernels.dispatch import implementation
from hisparse.kernels.row_state import RowState

__all__ = ["promote_tail", "rebalance", "reset_rows"]

_I32, _I64 = torch.int32, torch.int64


def promote_tail(
    rows: Tensor,
    page_index: Tensor,
    filled: Tensor,
    capacity: Tensor,
    state: RowState,
    tail_pages: Tensor,
    *,
    impl: str = "auto",
) -> None:
    """Let full tail pages enter the LRU as hottest, in place of the coldest slot's page.

    Device page ids are exchanged: the evicted page's memory becomes the row's next tail page.

    Args:
        rows: ``[R] int64``, state rows, unique.
        page_index: ``[R] int32``, index of the tail page in its sequence.
        filled: ``[R] bool``; other rows stay as they are, as do rows without capacity.
        capacity: ``[R] int32``.
        state: tables of the layer.
        tail_pages: ``[NR] int32``, device page of each state row's tail.
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape, dtype or device.
    """
    check_once(_check_promote, rows, page_index, filled, capacity, *state, tail_pages)
    ops = implementation(impl, rows.device)
    ops.promote_tail(rows, page_index, filled, capacity, state, tail_pages)


def reset_rows(rows: Tensor, capacity: Tensor, states: RowState, *, impl: str = "auto") -> None:
    """Empty the slots of rows, in all layers; rows keep their capacity and device pages.

    Args:
        rows: ``[M] int64``, state rows.
        capacity: ``[NR] int32``.
        states: tables of all layers, ``[L, NR, C]`` each.
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape, dtype or device.
    """
    check_once(_check_rows, rows, capacity, *states)
    implementation(impl, rows.device).reset_rows(rows, capacity, states)


def rebalance(
    rows: Tensor,
    new_capacity: Tensor,
    capacity: Tensor,
    states: RowState,
    free_pages: Tensor,
    num_free: Tensor,
    *,
    impl: str = "auto",
) -> None:
    """Change the capacity of rows, in all layers; no K/V bytes move.

    Shrinks come before grows, each in the order of ``rows``. A shrinking row drops its coldest
    slots and pushes their device pages, cold to hot, onto the free stack; a growing row pops its
    new pages one by one. A changed row's slots are renumbered ``0..n-1`` from cold to hot, newly
    gained empty slots first. A row whose capacity stays is left alone.

    The caller plans on the host, so nothing is read back from the device. A plan that does not fit
    changes less: a row whose new capacity is outside 0 to C stays as it is, and so does the first
    row that asks for more pages than are free, with all rows that grow after it.
    :func:`hisparse.kernels.verify_capacity` reports such rows.

    Args:
        rows: ``[M] int64``, state rows, unique.
        new_capacity: ``[M] int32``, 0 to C.
        capacity: ``[NR] int32``, updated.
        states: tables of all layers, ``[L, NR, C]`` each.
        free_pages: ``[L, N] int32``, stack of free device pages: the first ``num_free`` of a layer.
        num_free: ``[L] int32``, the same for every layer; updated.
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape, dtype or device.
    """
    check_once(_check_rows, rows, capacity, *states)
    check_once(_check_plan, rows, new_capacity, free_pages, num_free, states.slot_pages)
    if rows.numel() == 0:
        return
    ops = implementation(impl, rows.device)
    ops.rebalance(rows, new_capacity, capacity, states, free_pages, num_free)


def _check_promote(
    rows: Tensor,
    page_index: Tensor,
    filled: Tensor,
    capacity: Tensor,
    slot_pages: Tensor,
    lru_order: Tensor,
    device_pages: Tensor,
    tail_pages: Tensor,
) -> None:
    num_rows, device = rows.shape[0], rows.device
    check_tensor("rows", rows, _I64, (num_rows,))
    check_tensor("page_index", page_index, _I32, (num_rows,), device)
    check_tensor("filled", filled, torch.bool, (num_rows,), device)
    check_tensor("capacity", capacity, _I32, (num_rows,), device)
    check_tensor("slot_pages", slot_pages, _I32, (None, None), device)
    check_tensor("lru_order", lru_order, _I32, slot_pages.shape, device)
    check_tensor("device_pages", device_pages, _I32, slot_pages.shape, device)
    check_tensor("tail_pages", tail_pages, _I32, slot_pages.shape[:1], device)


def _check_rows(
    rows: Tensor, capacity: Tensor, slot_pages: Tensor, lru_order: Tensor, device_pages: Tensor
) -> None:
    device = rows.device
    check_tensor("rows", rows, _I64, (None,))
    check_tensor("slot_pages", slot_pages, _I32, (None, None, None), device)
    check_tensor("lru_order", lru_order, _I32, slot_pages.shape, device)
    check_tensor("device_pages", device_pages, _I32, slot_pages.shape, device)
    check_tensor("capacity", capacity, _I32, slot_pages.shape[1:2], device)


def _check_plan(
    rows: Tensor, new_capacity: Tensor, free_pages: Tensor, num_free: Tensor, slot_pages: Tensor
) -> None:
    layers, device = slot_pages.shape[0], rows.device
    check_tensor("new_capacity", new_capacity, _I32, rows.shape, device)
    check_tensor("free_pages", free_pages, _I32, (layers, None), device)
    check_tensor("num_free", num_free, _I32, (layers,), device)
