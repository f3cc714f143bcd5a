"""Changes to rows in plain PyTorch: the oracle that the other implementations equal bitwise."""

import torch
from torch import Tensor

from hisparse.kernels.lru.op import RowState
from hisparse.kernels.rows.op import TailPools


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
    copies = _copy_tails(pools, tail_pages.index_select(0, rows), len(page_index))
    page_index = page_index.repeat_interleave(len(rows) // max(len(page_index), 1))
    order, slots = state.lru_order[rows], state.lru_order.shape[1]
    apply = filled & (capacity > 0)
    coldest = torch.where(apply, order[:, 0], 0).long()
    last = (capacity.long() - 1).clamp(min=0)
    index = torch.arange(slots, device=rows.device)
    rotated = order.gather(1, (index + 1).clamp(max=slots - 1).expand(order.shape[0], -1))
    rotated = torch.where(index < last[:, None], rotated, order)
    rotated.scatter_(1, last[:, None], coldest[:, None].int())
    state.lru_order[rows] = torch.where(apply[:, None], rotated, order)
    old_page, old_tail = state.device_pages[rows, coldest], tail_pages[rows]
    state.device_pages[rows, coldest] = torch.where(apply, old_tail, old_page)
    tail_pages[rows] = torch.where(apply, old_page, old_tail)
    held = state.slot_pages[rows, coldest]
    state.slot_pages[rows, coldest] = torch.where(apply, page_index, held)
    return copies


def _copy_tails(pools: TailPools, tails: Tensor, num_requests: int) -> tuple[Tensor, ...]:
    """Pages ``tails [R] int32`` of each pool, as ``[T, Hkv, S, D]`` in the pool's dtype."""
    copies = tuple(pool[tails.long()] for pool in (pools.k, pools.v) if pool is not None)
    heads = len(tails) // max(num_requests, 1)
    if heads <= 1:
        return copies
    # Rows of one KV head have the same bytes.
    shape = (-1, pools.kv_heads, heads // pools.kv_heads)
    return tuple(x.unflatten(0, shape)[:, :, 0, 0] for x in copies)


def reset_rows(rows: Tensor, capacity: Tensor, states: RowState) -> None:
    """See :func:`hisparse.kernels.reset_rows`."""
    slot = torch.arange(states.lru_order.shape[2], dtype=torch.int32, device=rows.device)
    order = torch.where(slot < capacity.index_select(0, rows)[:, None], slot, -1)
    states.slot_pages[:, rows] = -1
    states.lru_order[:, rows] = order


def rebalance(
    rows: Tensor,
    new_capacity: Tensor,
    capacity: Tensor,
    states: RowState,
    free_pages: Tensor,
    num_free: Tensor,
) -> None:
    """See :func:`hisparse.kernels.rebalance`.

    All rows change at once. A rank is a place in a row's order from cold to hot: slot s of the
    renumbered row is rank ``s + dropped - gained`` of the old one.
    """
    slots, stack_size = states.lru_order.shape[2], free_pages.shape[1]
    old = capacity.index_select(0, rows).long()
    new = torch.where((new_capacity >= 0) & (new_capacity <= slots), new_capacity, old)
    free = num_free[0].long()
    dropped = _served(old - new, stack_size - free)
    gained = _served(new - old, free + dropped.sum())
    count = old - dropped + gained
    rank = torch.arange(slots, device=rows.device)
    by_rank = states.lru_order[:, rows].long().clamp(min=0)  # [L, M, C]
    held = states.slot_pages[:, rows].gather(2, by_rank)
    pages = states.device_pages[:, rows].gather(2, by_rank)

    # Dropped pages go onto the stack; what is not dropped goes to an extra column.
    bottom = free + dropped.cumsum(0) - dropped
    place = torch.where(rank < dropped[:, None], bottom[:, None] + rank, stack_size)
    stack = torch.nn.functional.pad(free_pages, (0, 1))
    stack.scatter_(1, place.flatten().expand(len(stack), -1), pages.flatten(1))
    # Gained pages come from its top, one by one.
    top = free + dropped.sum() - (gained.cumsum(0) - gained)
    popped = stack[:, (top[:, None] - 1 - rank).clamp(min=0)]

    source = rank + (dropped - gained)[:, None]
    at = source.clamp(0, slots - 1).expand_as(held)
    is_new, owned = source < 0, rank < count[:, None]
    renumbered = RowState(
        slot_pages=held.gather(2, at).masked_fill(is_new, -1),
        lru_order=rank.int().expand_as(held),
        device_pages=torch.where(is_new, popped, pages.gather(2, at)),
    )
    changed = (dropped + gained > 0)[:, None]
    for table, values in zip(states[:3], renumbered[:3], strict=True):
        values = values.masked_fill(~owned, -1)
        table[:, rows] = torch.where(changed, values, table[:, rows])
    free_pages.copy_(stack[:, :stack_size])
    capacity[rows] = count.int()
    num_free.copy_(free + dropped.sum() - gained.sum())


def _served(asked: Tensor, free: Tensor) -> Tensor:
    """What rows ``[M]`` get of what they ask for: all of it, until one asks beyond ``free``."""
    asked = asked.clamp(min=0)
    return torch.where(asked.cumsum(0) <= free, asked, 0)
