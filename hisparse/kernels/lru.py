"""LRU bookkeeping of device pages: checked entry points."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels import reference_lru
from hisparse.kernels._check import check_tensor
from hisparse.kernels._state import LruDiff, RowState

__all__ = ["lru_diff", "promote_tail", "rebalance", "reset_rows"]

_I32, _I64 = torch.int32, torch.int64


def lru_diff(
    selection: Tensor,
    host_page_table: Tensor,
    capacity: Tensor,
    num_real_rows: Tensor,
    state: RowState,
    *,
    rows: Tensor | None = None,
) -> LruDiff:
    """Find which selected pages are resident, choose victims, and say what to load where.

    The tables of ``state`` are updated in place: the order becomes survivors in their old order,
    then slots just loaded in load order, then hits in their old order.

    Args:
        selection: ``[R, K] int32``, page indices; -1 and duplicates may stand anywhere.
        host_page_table: ``[T, Pmax] int32``, host page of each page index; R is a multiple of T
            and row r uses table row ``r // (R // T)``, so that heads share a request's table.
        capacity: ``[R] int32``, slots of each row, at least the unique pages of its selection.
        num_real_rows: ``[1] int32``; rows from there on are padding: -1 out, nothing changed.
        state: tables of the layer.
        rows: ``[R] int64``, state row of each row; the first R state rows if None.

    Raises:
        KernelError: a tensor has another shape or dtype.
    """
    num_rows = selection.shape[0]
    num_states, slots = state.slot_pages.shape
    check_tensor("selection", selection, _I32, (None, None))
    check_tensor("host_page_table", host_page_table, _I32, (None, None))
    check_tensor("capacity", capacity, _I32, (num_rows,))
    check_tensor("num_real_rows", num_real_rows, _I32, (1,))
    for name, table in zip(state._fields, state, strict=True):
        check_tensor(name, table, _I32, (num_states, slots))
    if num_rows % host_page_table.shape[0]:
        raise KernelError(
            f"host_page_table: got {host_page_table.shape[0]} rows, expected a divisor of the "
            f"selection's {num_rows}"
        )
    if rows is None:
        rows = torch.arange(num_rows, device=selection.device)
    check_tensor("rows", rows, _I64, (num_rows,))
    return reference_lru.lru_diff(
        selection, host_page_table, capacity, num_real_rows, state, rows
    )


def promote_tail(
    rows: Tensor,
    page_index: Tensor,
    filled: Tensor,
    capacity: Tensor,
    state: RowState,
    tail_pages: Tensor,
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
    """
    num_rows = rows.shape[0]
    check_tensor("rows", rows, _I64, (num_rows,))
    check_tensor("page_index", page_index, _I32, (num_rows,))
    check_tensor("filled", filled, torch.bool, (num_rows,))
    check_tensor("capacity", capacity, _I32, (num_rows,))
    check_tensor("tail_pages", tail_pages, _I32, (state.slot_pages.shape[0],))
    reference_lru.promote_tail(rows, page_index, filled, capacity, state, tail_pages)


def reset_rows(rows: Tensor, capacity: Tensor, states: RowState) -> None:
    """Forget what rows hold, in all layers; they keep their capacity and device pages.

    Args:
        rows: ``[M] int64``, state rows.
        capacity: ``[NR] int32``.
        states: tables of all layers, ``[L, NR, C]`` each.
    """
    check_tensor("rows", rows, _I64, (None,))
    check_tensor("capacity", capacity, _I32, (states.slot_pages.shape[1],))
    reference_lru.reset_rows(rows, capacity, states)


def rebalance(
    rows: Tensor,
    new_capacity: Tensor,
    capacity: Tensor,
    states: RowState,
    free_pages: Tensor,
    num_free: Tensor,
) -> None:
    """Change the capacity of rows, in all layers; no K/V bytes move.

    Shrinks come before grows, each in the order of ``rows``. A shrinking row drops its coldest
    slots and pushes their device pages, cold to hot, onto the free stack; a growing row pops its
    new pages one by one. A changed row's slots are renumbered ``0..n-1`` from cold to hot, newly
    gained empty slots first. A row whose capacity stays is left alone.

    Args:
        rows: ``[M] int64``, state rows, unique.
        new_capacity: ``[M] int32``.
        capacity: ``[NR] int32``, updated.
        states: tables of all layers, ``[L, NR, C]`` each.
        free_pages: ``[L, N] int32``, stack of free device pages: the first ``num_free`` of a row.
        num_free: ``[L] int32``, the same for every layer.

    Raises:
        KernelError: more pages are asked for than are free, or than a row has room for.
    """
    layers, num_states, slots = states.slot_pages.shape
    check_tensor("rows", rows, _I64, (None,))
    check_tensor("new_capacity", new_capacity, _I32, tuple(rows.shape))
    check_tensor("capacity", capacity, _I32, (num_states,))
    check_tensor("free_pages", free_pages, _I32, (layers, None))
    check_tensor("num_free", num_free, _I32, (layers,))
    most, least = int(new_capacity.max()), int(new_capacity.min())
    if most > slots or least < 0:
        raise KernelError(f"new_capacity: got {least} to {most}, expected 0 to {slots}")
    asked = int((new_capacity - capacity[rows]).sum())
    if asked > int(num_free[0]):
        raise KernelError(f"new_capacity: asks for {asked} more pages, {int(num_free[0])} are free")
    reference_lru.rebalance(rows, new_capacity, capacity, states, free_pages, num_free)
