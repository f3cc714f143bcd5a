"""LRU bookkeeping in plain PyTorch: the oracle that the other implementations equal bitwise."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.row_state import LruDiff, RowState

__all__ = ["lru_diff", "promote_tail", "rebalance", "reset_rows"]


def lru_diff(
    selection: Tensor,
    host_page_table: Tensor,
    capacity: Tensor,
    num_real_rows: Tensor,
    state: RowState,
    rows: Tensor,
    out: LruDiff | None = None,
) -> LruDiff:
    """See :func:`hisparse.kernels.lru_diff`.

    Everything is a scatter or gather into tables with one more column than needed: what does not
    apply is sent to the extra column, so that no shape depends on the data.
    """
    num_rows, width = selection.shape
    slots = state.slot_pages.shape[1]
    num_pages = host_page_table.shape[1]
    index = torch.arange(max(width, slots, num_rows), device=selection.device)
    real = index[:num_rows] < num_real_rows
    pages = torch.where(real[:, None], selection, -1).long()
    wanted = pages >= 0
    dumped = torch.where(wanted, pages, num_pages)
    slot_pages, order = state.slot_pages[rows], state.lru_order[rows].long()

    # 1. Intersection: where each page is, and which entry names it first.
    slot_of = pages.new_full((num_rows, num_pages + 1), -1)
    listed = (slot_pages >= 0) & (slot_pages < num_pages)
    held = torch.where(listed, slot_pages, num_pages).long()
    slot_of.scatter_(1, held, index[:slots].expand(num_rows, -1))
    slot_of[:, num_pages] = -1
    hit_slots = slot_of.gather(1, dumped)
    entry = index[:width].expand(num_rows, -1)
    first_entry = pages.new_full((num_rows, num_pages + 1), width)
    first_entry.scatter_reduce_(1, dumped, entry, "amin")
    first_entry = first_entry.gather(1, dumped)
    is_first = wanted & (first_entry == entry)
    hit = hit_slots >= 0
    first_miss = is_first & ~hit
    num_misses = first_miss.sum(1)
    num_hits = is_first.sum(1) - num_misses

    # 2. Eviction: the coldest slots that hold no selected page, one for each miss.
    chosen = torch.zeros(num_rows, slots + 1, dtype=torch.bool, device=pages.device)
    chosen.scatter_(1, torch.where(hit, hit_slots, slots), True)
    owned = index[:slots] < capacity[:, None]
    order = torch.where(owned, order, slots)
    kept_hot = chosen.gather(1, order) & owned
    free = owned & ~kept_hot
    rank = free.cumsum(1) - 1
    victim = free & (rank < num_misses[:, None])
    victims = pages.new_full((num_rows, width + 1), -1)
    victims.scatter_(1, torch.where(victim, rank, width), torch.where(victim, order, -1))
    victims[:, width] = -1

    # 3. Load mapping: misses in order of first occurrence take the victims, coldest first.
    miss_rank = first_miss.cumsum(1) - 1
    entry_rank = miss_rank.gather(1, first_entry.clamp(max=width - 1))
    missed = torch.where(wanted & ~hit, entry_rank, width)
    current = torch.where(hit, hit_slots, victims.gather(1, missed))
    load_pages = pages.new_full((num_rows, width + 1), -1)
    load_pages.scatter_(1, torch.where(first_miss, miss_rank, width), pages)
    load_pages = load_pages[:, :width]
    loaded = index[:width] < num_misses[:, None]
    load_pages = torch.where(loaded, load_pages, -1)
    table = host_page_table
    if num_rows != table.shape[0]:
        table = table.repeat_interleave(num_rows // table.shape[0], dim=0)
    load_host = torch.where(loaded, table.gather(1, load_pages.clamp(min=0)), -1)

    # New order: survivors, then loaded, then hits.
    survivor = free & ~victim
    num_survivors = survivor.sum(1, keepdim=True)
    place = torch.where(survivor, survivor.cumsum(1) - 1, num_survivors + rank)
    after_loads = num_survivors + num_misses[:, None]
    place = torch.where(kept_hot, after_loads + kept_hot.cumsum(1) - 1, place)
    place = torch.where(owned, place, index[:slots])
    new_order = order.scatter(1, place, torch.where(owned, order, -1))
    new_pages = torch.nn.functional.pad(slot_pages, (0, 1))
    new_pages.scatter_(1, torch.where(loaded, victims[:, :width], slots), load_pages.int())

    # A padded row writes what the first row writes: it may alias any state row.
    source = torch.where(real, index[:num_rows], 0)
    target = rows[source]
    state.slot_pages[target] = new_pages[source, :slots]
    state.lru_order[target] = new_order[source].int()
    diff = (current, load_host, victims[:, :width], num_hits, num_misses)
    if out is None:
        return LruDiff(*(x.int() for x in diff))
    for given, x in zip(out, diff, strict=True):
        given.copy_(x)
    return out


def promote_tail(
    rows: Tensor,
    page_index: Tensor,
    filled: Tensor,
    capacity: Tensor,
    state: RowState,
    tail_pages: Tensor,
) -> None:
    """See :func:`hisparse.kernels.promote_tail`."""
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


def reset_rows(rows: Tensor, capacity: Tensor, states: RowState) -> None:
    """See :func:`hisparse.kernels.reset_rows`."""
    slot = torch.arange(states.lru_order.shape[2], dtype=torch.int32, device=rows.device)
    states.slot_pages[:, rows] = -1
    states.lru_order[:, rows] = torch.where(slot < capacity[rows, None], slot, -1)


def rebalance(
    rows: Tensor,
    new_capacity: Tensor,
    capacity: Tensor,
    states: RowState,
    free_pages: Tensor,
    num_free: Tensor,
) -> None:
    """See :func:`hisparse.kernels.rebalance`; the few rows that change are known on the host."""
    changes = list(zip(rows.tolist(), capacity[rows].tolist(), new_capacity.tolist(), strict=True))
    free = int(num_free[0])
    for row, old, new in (c for c in changes if c[2] < c[1]):
        order = states.lru_order[:, row, :old].long()
        pages = states.device_pages[:, row].gather(1, order)
        free_pages[:, free : free + old - new] = pages[:, : old - new]
        free += old - new
        held = states.slot_pages[:, row].gather(1, order)[:, old - new :]
        _renumber(states, row, held, pages[:, old - new :])
    for row, old, new in (c for c in changes if c[2] > c[1]):
        order = states.lru_order[:, row, :old].long()
        gained = free_pages[:, free - (new - old) : free].flip(1)
        free -= new - old
        pages = states.device_pages[:, row].gather(1, order)
        held = states.slot_pages[:, row].gather(1, order)
        empty = torch.full_like(gained, -1)
        _renumber(states, row, torch.cat([empty, held], 1), torch.cat([gained, pages], 1))
    capacity[rows] = new_capacity
    num_free.fill_(free)


def _renumber(states: RowState, row: int, held: Tensor, pages: Tensor) -> None:
    """Give a row the slots ``0..n-1``, cold to hot: ``held``, ``pages`` ``[L, n]``."""
    count = held.shape[1]
    for table in states:
        table[:, row] = -1
    states.slot_pages[:, row, :count] = held
    states.device_pages[:, row, :count] = pages
    states.lru_order[:, row, :count] = torch.arange(count, device=held.device)
