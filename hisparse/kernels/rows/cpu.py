"""Changes to rows in C++."""

from __future__ import annotations

from torch import Tensor

from hisparse.kernels.lru.op import RowState
from hisparse.kernels.rows.op import PROMOTE_TAIL, REBALANCE, TailPools, copy_tails

__all__ = ["promote_tail", "rebalance"]


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
    copies = copy_tails(pools, tail_pages[rows], len(page_index))
    PROMOTE_TAIL.on_cpu(rows, page_index, filled, capacity, *state[:3], None, tail_pages)
    return copies


def rebalance(
    rows: Tensor,
    new_capacity: Tensor,
    capacity: Tensor,
    states: RowState,
    free_pages: Tensor,
    num_free: Tensor,
) -> None:
    """See :func:`hisparse.kernels.rebalance`."""
    REBALANCE.on_cpu(rows, new_capacity, capacity, *states[:3], None, free_pages, num_free)
