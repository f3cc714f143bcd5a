"""Changes to rows outside ``lru_diff``, for capacity, reuse and full tail pages: entry points."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.checks import check_device, check_once, check_tensor
from hisparse.kernels.dispatch import implementation
from hisparse.kernels.row_state import RowState

__all__ = ["drop_pages", "promote_tail", "rebalance", "reset_rows"]

_I32, _I64 = torch.int32, torch.int64


def promote_tail(
    rows: Tensor,
    page_index: Tensor,
    filled: Tensor,
    capacity: Tensor,
    state: RowState,
    tail_pages: Tensor,
    *,
    pools: tuple[Tensor, ...] = (),
    kv_heads: int = 1,
    impl: str = "auto",
) -> tuple[Tensor, ...]:
    """Let full tail pages enter the LRU as hottest, in place of the coldest slot's page.

    Device page ids are exchanged: the evicted page's memory becomes the row's next tail page.

    Args:
        rows: ``[R] int64``, state rows, unique; row r belongs to request ``r // (R // T)``.
        page_index: ``[T] int32``, index of each request's tail page in its sequence.
        filled: ``[R] bool``; other rows stay as they are, as do rows without capacity.
        capacity: ``[R] int32``.
        state: tables of the layer.
        tail_pages: ``[NR] int32``, device page of each state row's tail.
        pools: none, keys, or keys and values of the device pages ``[N, Hr, S, D]``; Hr is the
            number of KV heads, or 1 if a row has one head.
        kv_heads: Hkv, with ``pools``.
        impl: "auto", or an implementation's name.

    Returns:
        copies of the full tail pages, ``[T, Hkv, S, D]`` for each pool; a GPU leaves the entries of
        requests whose tail page is not full uninitialised.

    Raises:
        KernelError: a tensor has another shape, dtype or device.
    """
    tensors = (rows, page_index, filled, capacity, *state, tail_pages, *pools)
    check_once(_check_promote, *tensors, values=(kv_heads,))
    ops = implementation(impl, rows.device)
    copies: tuple[Tensor, ...] = ops.promote_tail(
        rows, page_index, filled, capacity, state, tail_pages, pools, kv_heads
    )
    return copies


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


def drop_pages(rows: Tensor, stale: Tensor, states: RowState) -> None:
    """Empty the slots that hold certain pages, in all layers; these slots become the coldest.

    Runs once after some prefills, so PyTorch's operations serve all devices.

    Args:
        rows: ``[M] int64``, state rows, unique.
        stale: ``[P] bool``, the page indices to drop; pages from P on stay.
        states: tables of all layers, ``[L, NR, C]`` each.

    Raises:
        KernelError: a tensor has another shape, dtype or device.
    """
    check_tensor("rows", rows, _I64, (None,))
    check_tensor("stale", stale, torch.bool, (None,), rows.device)
    held, order = states.slot_pages[:, rows], states.lru_order[:, rows]
    # The last entry is for empty slots and for pages that stay.
    kept = torch.nn.functional.pad(~stale, (0, 1), value=True)
    held = held.where(kept[held.long().clamp(-1, len(stale))], -1)
    is_empty = held.gather(2, order.long().clamp(min=0)) < 0
    rank = torch.where(order < 0, 2, torch.where(is_empty, 0, 1))
    states.lru_order[:, rows] = order.gather(2, rank.argsort(dim=2, stable=True))
    states.slot_pages[:, rows] = held


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
    page_slots: Tensor | None,
    tail_pages: Tensor,
    *pools_and_heads: Any,
) -> None:
    num_rows, device = rows.shape[0], rows.device
    check_tensor("rows", rows, _I64, (num_rows,))
    check_tensor("page_index", page_index, _I32, (None,), device)
    requests = page_index.shape[0]
    if (num_rows % requests if requests else num_rows) != 0:
        raise KernelError(
            f"page_index: got {requests} requests, expected a divisor of the {num_rows} rows"
        )
    check_tensor("filled", filled, torch.bool, (num_rows,), device)
    check_tensor("capacity", capacity, _I32, (num_rows,), device)
    check_tensor("slot_pages", slot_pages, _I32, (None, None), device)
    _check_tables(slot_pages, lru_order, device_pages, page_slots)
    check_tensor("tail_pages", tail_pages, _I32, slot_pages.shape[:1], device)
    *pools, kv_heads = pools_and_heads
    for pool in pools:
        heads = num_rows // max(requests, 1)
        check_tensor("pools", pool, pool.dtype, (None, kv_heads if heads == 1 else 1, None, None))
        check_device("pools", pool, device)


def _check_rows(
    rows: Tensor,
    capacity: Tensor,
    slot_pages: Tensor,
    lru_order: Tensor,
    device_pages: Tensor,
    page_slots: Tensor | None,
) -> None:
    device = rows.device
    check_tensor("rows", rows, _I64, (None,))
    check_tensor("slot_pages", slot_pages, _I32, (None, None, None), device)
    _check_tables(slot_pages, lru_order, device_pages, page_slots)
    check_tensor("capacity", capacity, _I32, slot_pages.shape[1:2], device)


def _check_tables(
    slot_pages: Tensor, lru_order: Tensor, device_pages: Tensor, page_slots: Tensor | None
) -> None:
    shape, device = slot_pages.shape, slot_pages.device
    check_tensor("lru_order", lru_order, _I32, shape, device)
    check_tensor("device_pages", device_pages, _I32, shape, device)
    if page_slots is not None:
        check_tensor("page_slots", page_slots, _I32, (*shape[:-1], None), device)


def _check_plan(
    rows: Tensor, new_capacity: Tensor, free_pages: Tensor, num_free: Tensor, slot_pages: Tensor
) -> None:
    layers, device = slot_pages.shape[0], rows.device
    check_tensor("new_capacity", new_capacity, _I32, rows.shape, device)
    check_tensor("free_pages", free_pages, _I32, (layers, None), device)
    check_tensor("num_free", num_free, _I32, (layers,), device)
