"""LRU bookkeeping in plain PyTorch: the oracle that the other implementations equal bitwise."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hisparse.kernels.lru.op import (
    DecodeRows,
    DiffTables,
    LruDiff,
    RowState,
    with_dense_requests,
)


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
    num_pages: Tensor | None = None,
) -> LruDiff:
    """See :func:`hisparse.kernels.lru_diff`; a row with a page beyond its limit is refused."""
    inputs = (selection, host_page_table, capacity, num_real_rows, state, rows)
    rounds = _rounds(rows, len(host_page_table))
    if len(rounds) <= 1:
        return _lru_diff(*inputs, num_pages)
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
    slot_pages = pad(slot_pages, (0, 1))
    slot_pages.scatter_(1, loaded_slots, load_pages.int())
    # A padded row writes what the first row writes: it may alias any state row.
    source = torch.where(real, row, 0)
    target = rows[source]
    state.slot_pages[target] = slot_pages[source, :-1]
    state.lru_order[target] = order[source].int()
    return LruDiff(*(x.int() for x in diff))


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


def diff_tables(
    selection: Tensor | None,
    lengths: Tensor | None,
    rows: DecodeRows,
    state: RowState,
    page_size: int,
    width: int,
    tail_below: int,
) -> DiffTables:
    """See :func:`hisparse.kernels.diff_tables`."""
    pages, lengths, dense = with_dense_requests(selection, lengths, rows, width)
    diff = lru_diff(
        pages,
        rows.host_page_table,
        rows.capacity,
        rows.num_real_rows,
        state,
        rows.rows,
        rows.num_pages,
    )
    if rows.malformed is not None:
        rows.malformed.add_(_malformed(diff, lengths, rows.num_real_rows).sum())
    attended = _pages_of(state.device_pages, rows.rows, diff.curr_device_slots)
    absent = _lacks_page(attended, lengths)
    attended = pad(attended.masked_fill(absent[:, None], -1), (0, 1), value=-1)
    lengths = lengths.masked_fill(absent, 0)
    attended.scatter_(1, lengths[:, None].long(), rows.tail_pages[:, None])
    has_tail = lengths < tail_below
    if dense is not None:
        has_tail |= dense
    tail_lens = torch.where(has_tail, rows.tail_lens, 0)
    loads = _pages_of(state.device_pages, rows.rows, diff.load_device_slots)
    return DiffTables(
        attended,
        tail_lens + lengths * page_size,
        loads,
        diff.load_host_pages,
        diff.num_hits,
        diff.num_misses,
    )


def _lacks_page(pages: Tensor, lengths: Tensor) -> Tensor:
    """``[R] bool``, rows without a page at one of the first ``lengths`` entries."""
    entry = torch.arange(pages.shape[1], device=lengths.device)
    absent = ((pages < 0) & (entry < lengths[:, None])).any(1)
    return absent | (lengths < 0) | (lengths > pages.shape[1])


def _malformed(diff: LruDiff, lengths: Tensor, num_real_rows: Tensor) -> Tensor:
    """``[R] bool``, real rows with a duplicate, a gap, a page too many, or that were refused."""
    rows, width = diff.curr_device_slots.shape
    entry = torch.arange(width, device=lengths.device)
    misplaced = (diff.curr_device_slots >= 0) != (entry < lengths[:, None])
    wrong = misplaced.any(1) | (diff.num_hits + diff.num_misses != lengths)
    return wrong & (torch.arange(rows, device=lengths.device) < num_real_rows)


def _pages_of(device_pages: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """Device pages of ``slots [R, K]``, -1 where there is no slot; ``device_pages [NR, C]``."""
    return device_pages[rows[:, None], slots.clamp(min=0)].masked_fill(slots < 0, -1)
