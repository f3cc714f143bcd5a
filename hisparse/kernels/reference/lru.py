"""LRU bookkeeping in plain PyTorch: the oracle that the other implementations equal bitwise."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hisparse.kernels.row_state import LruDiff, RowState

__all__ = ["copy_tails", "lru_diff", "promote_tail", "rebalance", "reset_rows"]


class _Intersection(NamedTuple):
    """What a selection ``[R, K]`` has in common with the resident pages."""

    wanted: Tensor  # [R, K] bool, entries that name a page
    slots: Tensor  # [R, K], slot that holds the page, -1 for a miss
    first_entry: Tensor  # [R, K], entry that names the same page first
    first_hit: Tensor  # [R, K] bool, that entry, of a page that is resident
    first_miss: Tensor  # [R, K] bool, that entry, of a page that is not


def lru_diff(
    selection: Tensor,
    host_page_table: Tensor,
    capacity: Tensor,
    num_real_rows: Tensor,
    state: RowState,
    rows: Tensor,
    out: LruDiff | None = None,
    num_pages: Tensor | None = None,
) -> LruDiff:
    """See :func:`hisparse.kernels.lru_diff`; a row with a page beyond its limit is refused."""
    inputs = (selection, host_page_table, capacity, num_real_rows, state, rows)
    rounds = _rounds(rows, len(host_page_table))
    if len(rounds) <= 1:
        return _lru_diff(*inputs, out, num_pages)
    if out is None:
        entries = (torch.empty_like(selection) for _ in range(3))
        out = LruDiff(*entries, *(torch.empty_like(capacity) for _ in range(2)))
    heads = len(rows) // len(host_page_table)
    for requests in rounds:
        index = (requests[:, None] * heads + torch.arange(heads)).flatten()
        diff = _lru_diff(
            selection[index],
            host_page_table[requests],
            capacity[index],
            (index < num_real_rows).sum(0, keepdim=True),
            state,
            rows[index],
            None,
            None if num_pages is None else num_pages[requests],
        )
        for given, x in zip(out, diff, strict=True):
            given[index] = x
    return out


def _rounds(rows: Tensor, requests: int) -> list[Tensor]:
    """Requests ``[n] int64`` with different state rows; of requests with the same, the first first.

    Args:
        rows: ``[R] int64``, state rows. On CUDA no row stands twice, and nothing is looked at.
        requests: T.
    """
    if rows.device.type != "cpu" or requests < 2 or not len(rows):
        return []
    first = rows[:: len(rows) // requests]
    same = (first[:, None] == first).tril(-1)
    place = same.sum(1)
    return [torch.nonzero(place == i)[:, 0] for i in range(int(place.max()) + 1)]


def _lru_diff(
    selection: Tensor,
    host_page_table: Tensor,
    capacity: Tensor,
    num_real_rows: Tensor,
    state: RowState,
    rows: Tensor,
    out: LruDiff | None,
    num_pages: Tensor | None,
) -> LruDiff:
    """The same for different rows.

    Every phase scatters and gathers in tables with one more column than needed. What does not
    apply goes to the extra column, so that no shape depends on the data.
    """
    num_rows = selection.shape[0]
    row = torch.arange(num_rows, device=selection.device)
    real = row < num_real_rows
    served = real
    if num_pages is not None:
        limit = num_pages.repeat_interleave(num_rows // max(len(num_pages), 1))
        served = real & (selection < limit[:, None]).all(1)
    pages = torch.where(served[:, None], selection, -1).long()
    slot_pages, order = state.slot_pages[rows], state.lru_order[rows].long()
    found = _intersect(pages, slot_pages, host_page_table.shape[1])
    victims, order = _evict(order, capacity, found)
    diff, load_pages = _map_loads(pages, host_page_table, found, victims)
    diff = diff._replace(num_misses=diff.num_misses.masked_fill(real & ~served, -1))

    loaded_slots = torch.where(load_pages >= 0, diff.load_device_slots, slot_pages.shape[1])
    slot_pages = torch.nn.functional.pad(slot_pages, (0, 1))
    slot_pages.scatter_(1, loaded_slots, load_pages.int())
    # A padded row writes what the first row writes: it may alias any state row.
    source = torch.where(real, row, 0)
    target = rows[source]
    state.slot_pages[target] = slot_pages[source, :-1]
    state.lru_order[target] = order[source].int()
    if out is None:
        return LruDiff(*(x.int() for x in diff))
    for given, x in zip(out, diff, strict=True):
        given.copy_(x)
    return out


def _intersect(pages: Tensor, slot_pages: Tensor, num_pages: int) -> _Intersection:
    """Phase 1: where each selected page is, and which entry names it first.

    Args:
        pages: ``[R, K] int64``, the selection, -1 for none.
        slot_pages: ``[R, C] int32``, the page that each slot holds.
        num_pages: pages of a sequence at most.
    """
    width = pages.shape[1]
    slot = torch.arange(slot_pages.shape[1], device=pages.device).expand_as(slot_pages)
    entry = torch.arange(width, device=pages.device).expand_as(pages)
    wanted = pages >= 0
    dumped = torch.where(wanted, pages, num_pages)
    listed = (slot_pages >= 0) & (slot_pages < num_pages)
    by_page = pages.new_full((pages.shape[0], num_pages + 1), -1)
    by_page.scatter_(1, torch.where(listed, slot_pages, num_pages).long(), slot)
    by_page[:, num_pages] = -1
    slots = by_page.gather(1, dumped)
    by_page.fill_(width).scatter_reduce_(1, dumped, entry, "amin")
    first_entry = by_page.gather(1, dumped)
    is_first = wanted & (first_entry == entry)
    return _Intersection(
        wanted, slots, first_entry, is_first & (slots >= 0), is_first & (slots < 0)
    )


def _evict(order: Tensor, capacity: Tensor, found: _Intersection) -> tuple[Tensor, Tensor]:
    """Phase 2: the coldest slots that hold no selected page give way, one for each miss.

    Args:
        order: ``[R, C] int64``, slots from cold to hot.
        capacity: ``[R] int32``.
        found: phase 1.

    Returns:
        victims ``[R, K + 1]``, coldest first, then -1; and the new order ``[R, C]``: survivors in
        their old order, then victims, which are loaded, then hits in their old order.
    """
    (num_rows, slots), width = order.shape, found.slots.shape[1]
    num_misses = found.first_miss.sum(1, keepdim=True)
    index = torch.arange(slots, device=order.device)
    selected = torch.zeros(num_rows, slots + 1, dtype=torch.bool, device=order.device)
    selected.scatter_(1, torch.where(found.slots >= 0, found.slots, slots), True)
    owned = index < capacity[:, None]
    order = torch.where(owned, order, slots)
    hit = selected.gather(1, order) & owned
    free = owned & ~hit
    rank = free.cumsum(1) - 1
    victim = free & (rank < num_misses)
    victims = order.new_full((num_rows, width + 1), -1)
    victims.scatter_(1, torch.where(victim, rank, width), torch.where(victim, order, -1))
    victims[:, width] = -1

    survivor = free & ~victim
    num_survivors = survivor.sum(1, keepdim=True)
    place = torch.where(survivor, survivor.cumsum(1) - 1, num_survivors + rank)
    place = torch.where(hit, num_survivors + num_misses + hit.cumsum(1) - 1, place)
    place = torch.where(owned, place, index)
    return victims, order.scatter(1, place, torch.where(owned, order, -1))


def _map_loads(
    pages: Tensor, host_page_table: Tensor, found: _Intersection, victims: Tensor
) -> tuple[LruDiff, Tensor]:
    """Phase 3: misses in order of first occurrence take the victims, coldest first.

    Args:
        pages: ``[R, K] int64``, the selection.
        host_page_table: ``[T, Pmax] int32``.
        found: phase 1.
        victims: ``[R, K + 1]``, of phase 2.

    Returns:
        The result, as int64, and ``[R, K]``, the page index of each load, -1 padded.
    """
    num_rows, width = pages.shape
    num_misses = found.first_miss.sum(1)
    rank = found.first_miss.cumsum(1) - 1
    load_pages = pages.new_full((num_rows, width + 1), -1)
    load_pages.scatter_(1, torch.where(found.first_miss, rank, width), pages)
    loaded = torch.arange(width, device=pages.device) < num_misses[:, None]
    load_pages = torch.where(loaded, load_pages[:, :width], -1)
    table = host_page_table.repeat_interleave(num_rows // max(len(host_page_table), 1), dim=0)
    load_host = torch.where(loaded, table.gather(1, load_pages.clamp(min=0)), -1)

    # Duplicates of a miss have the rank of its first entry.
    missed = found.wanted & (found.slots < 0)
    own_rank = rank.gather(1, found.first_entry.clamp(max=width - 1))
    victim = victims.gather(1, torch.where(missed, own_rank, width))
    current = torch.where(missed, victim, found.slots)
    num_hits = found.first_hit.sum(1)
    return LruDiff(current, load_host, victims[:, :width], num_hits, num_misses), load_pages


def promote_tail(
    rows: Tensor,
    page_index: Tensor,
    filled: Tensor,
    capacity: Tensor,
    state: RowState,
    tail_pages: Tensor,
    pools: tuple[Tensor, ...],
    kv_heads: int,
) -> tuple[Tensor, ...]:
    """See :func:`hisparse.kernels.promote_tail`."""
    copies = copy_tails(pools, tail_pages[rows], len(page_index), kv_heads)
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


def copy_tails(
    pools: tuple[Tensor, ...], tails: Tensor, num_requests: int, kv_heads: int
) -> tuple[Tensor, ...]:
    """Pages ``tails [R]`` of each pool ``[N, Hr, S, D]``, as ``[T, Hkv, S, D]``."""
    copies = tuple(pool[tails.long()] for pool in pools)
    heads = len(tails) // max(num_requests, 1)
    if heads <= 1:
        return copies
    # Rows of one KV head have the same bytes.
    return tuple(x.unflatten(0, (-1, kv_heads, heads // kv_heads))[:, :, 0, 0] for x in copies)


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
    """See :func:`hisparse.kernels.rebalance`.

    All rows change at once. A rank is a place in a row's order from cold to hot: slot s of the
    renumbered row is rank ``s + dropped - gained`` of the old one.
    """
    slots, stack_size = states.lru_order.shape[2], free_pages.shape[1]
    old = capacity[rows].long()
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


def _served(asked: Tensor, room: Tensor) -> Tensor:
    """What rows ``[M]`` get of what they ask for: all of it, until one asks beyond ``room``."""
    asked = asked.clamp(min=0)
    return torch.where(asked.cumsum(0) <= room, asked, 0)
