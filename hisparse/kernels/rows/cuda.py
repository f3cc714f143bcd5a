"""Changes to rows on CUDA devices; nothing waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.lru.op import RowState
from hisparse.kernels.rows.op import PROMOTE_TAIL, REBALANCE, RESET_ROWS, TailPools

__all__ = ["promote_tail", "rebalance", "reset_rows"]


def promote_tail(
    rows: Tensor,
    page_index: Tensor,
    filled: Tensor,
    capacity: Tensor,
    state: RowState,
    tail_pages: Tensor,
    pools: TailPools,
) -> tuple[Tensor, ...]:
    """See :func:`hisparse.kernels.promote_tail`."""
    shape = (page_index.shape[0], pools.kv_heads)
    given = [pool for pool in (pools.k, pools.v) if pool is not None]
    copies = tuple(pool.new_empty(*shape, *pool.shape[-2:]) for pool in given)
    inputs = (rows, page_index, filled, capacity, *state, tail_pages, pools.k, pools.v)
    PROMOTE_TAIL.on_cuda(*inputs, more=(*copies, None, None)[:2])
    return copies


def reset_rows(rows: Tensor, capacity: Tensor, states: RowState) -> None:
    """See :func:`hisparse.kernels.reset_rows`."""
    RESET_ROWS.on_cuda(rows, capacity, *states)


def rebalance(
    rows: Tensor,
    new_capacity: Tensor,
    capacity: Tensor,
    states: RowState,
    free_pages: Tensor,
    num_free: Tensor,
) -> None:
    """See :func:`hisparse.kernels.rebalance`."""
    layers, _, slots = states.slot_pages.shape
    more = (capacity.new_empty((layers, 2, slots)), torch.zeros_like(new_capacity))
    inputs = (rows, new_capacity, capacity, *states, free_pages, num_free)
    REBALANCE.on_cuda(*inputs, more=more)
