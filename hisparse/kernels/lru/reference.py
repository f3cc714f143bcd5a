"""LRU bookkeeping in plain PyTorch: the oracle that the other implementations equal bitwise."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hisparse.kernels.lru.op import DecodeRows, DiffTables, RowState, with_dense_requests
from hisparse.types import Selection


class _LruDiff(NamedTuple):
    """Hits, misses and loads of one step; int32, -1 padded."""

    current: Tensor  # [R, K], slot of each selected page, hit or miss
    load_host_pages: Tensor  # [R, K], host pages of the misses, in order of first occurrence
    load_slots: Tensor  # [R, K], slot that each miss is loaded to
    num_hits: Tensor  # [R], unique pages that were resident
    num_misses: Tensor  # [R], unique pages that were not; -1: the row is refused
    missed: Tensor  # [R, K], 1 for entries whose page was not resident, else 0


class _Intersection(NamedTuple):
    """What a selection ``[R, K]`` has in common with the resident pages."""

    wanted: Tensor  # [R, K] bool, entries that name a page
    slots: Tensor  # [R, K], slot that holds the page, -1 for a miss
    first_entry: Tensor  # [R, K], entry that names the same page first
    first_hit: Tensor  # [R, K] bool, that entry, of a page that is resident
    first_miss: Tensor  # [R, K] bool, that entry, of a page that is not


def _in_rounds(pages: Tensor, rows: DecodeRows, state: RowState) -> _LruDiff:
    """:func:`_lru_diff` for ``pages [R, K] int32``; the same state rows follow in order."""
    rounds = _rounds(rows.rows, len(rows.num_pages))
    if len(rounds) <= 1:
        return _lru_diff(pages, rows, state)
    shapes = (*[pages] * 3, *[rows.capacity] * 2, pages)
    out = _LruDiff(*map(torch.empty_like, shapes))
    heads = len(rows.rows) // len(rows.num_pages)
    for requests in rounds:
        index = (requests[:, None] * heads + torch.arange(heads)).flatten()
        some = rows._replace(
            rows=rows.rows[index],
            capacity=rows.capacity[index],
            num_real_rows=(index < rows.num_real_rows).sum(0, keepdim=True),
            host_page_table=rows.host_page_table[requests],
            num_pages=rows.num_pages[requests],
        )
        found = _lru_diff(pages[index], some, state)
        for given, x in zip(out, found, strict=True):
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


def _lru_diff(selection: Tensor, rows: DecodeRows, state: RowState) -> _LruDiff:
    """Hits, misses and loads of different state rows, whose tables are updated.

    Every phase scatters and gathers in tables with one more column than needed. What does not
    apply goes to the extra column, so that no shape depends on the data.
    """
    num_rows, table = selection.shape[0], rows.host_page_table
    row = torch.arange(num_rows, device=selection.device)
    real = row < rows.num_real_rows
    limit = rows.num_pages.repeat_interleave(num_rows // max(len(rows.num_pages), 1))
    served = real & (selection < limit.clamp(max=table.shape[1])[:, None]).all(1)
    pages = torch.where(served[:, None], selection, -1).long()
    # Unlike an index in brackets, index_select refuses -1.
    slot_pages, order = (x.index_select(0, rows.rows) for x in state[:2])
    found = _intersect(pages, slot_pages, table.shape[1])
    num_loads = found.first_miss.sum(1, keepdim=True)
    victims, order = _evict(order.long(), rows.capacity, found, num_loads)
    diff, load_pages = _map_loads(pages, table, found, victims)
    diff = diff._replace(num_misses=diff.num_misses.masked_fill(real & ~served, -1))

    loaded_slots = torch.where(load_pages >= 0, diff.load_slots, slot_pages.shape[1])
    slot_pages = pad(slot_pages, (0, 1))
    slot_pages.scatter_(1, loaded_slots, load_pages.int())
    # A padded row writes what the first row writes: it may alias any state row.
    source = torch.where(real, row, 0)
    target = rows.rows[source]
    state.slot_pages[target] = slot_pages[source, :-1]
    state.lru_order[target] = order[source].int()
    return _LruDiff(*(x.int() for x in diff))


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


def _evict(
    order: Tensor, capacity: Tensor, found: _Intersection, num_loads: Tensor
) -> tuple[Tensor, Tensor]:
    """Phase 2: the coldest slots that hold no selected page give way, one for each load.

    Args:
        order: ``[R, C] int64``, slots from cold to hot.
        capacity: ``[R] int32``.
        found: phase 1.
        num_loads: ``[R, 1] int64``.

    Returns:
        victims ``[R, K + 1]``, coldest first, then -1; and the new order ``[R, C]``: survivors in
        their old order, then victims, which are loaded, then hits in their old order.
    """
    (num_rows, slots), width = order.shape, found.slots.shape[1]
    index = torch.arange(slots, device=order.device)
    selected = torch.zeros(num_rows, slots + 1, dtype=torch.bool, device=order.device)
    selected.scatter_(1, torch.where(found.slots >= 0, found.slots, slots), True)
    owned = index < capacity[:, None]
    order = torch.where(owned, order, slots)
    hit = selected.gather(1, order) & owned
    free = owned & ~hit
    rank = free.cumsum(1) - 1
    victim = free & (rank < num_loads)
    victims = order.new_full((num_rows, width + 1), -1)
    victims.scatter_(1, torch.where(victim, rank, width), torch.where(victim, order, -1))
    victims[:, width] = -1

    survivor = free & ~victim
    num_survivors = survivor.sum(1, keepdim=True)
    place = torch.where(survivor, survivor.cumsum(1) - 1, num_survivors + rank)
    place = torch.where(hit, num_survivors + num_loads + hit.cumsum(1) - 1, place)
    place = torch.where(owned, place, index)
    return victims, order.scatter(1, place, torch.where(owned, order, -1))


def _map_loads(
    pages: Tensor, host_page_table: Tensor, found: _Intersection, victims: Tensor
) -> tuple[_LruDiff, Tensor]:
    """Phase 3: misses in order of first occurrence take the victims, coldest first.

    Args:
        pages: ``[R, K] int64``, the selection.
        host_page_table: ``[T, Pmax] int32``.
        found: phase 1.
        victims: ``[R, K + 1]``, of phase 2.

    Returns:
        The result, as int64; and ``[R, K]``, the page index of each load, -1 padded.
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
    diff = _LruDiff(current, load_host, victims[:, :width], num_hits, num_misses, missed)
    return diff, load_pages


def diff_tables(
    selection: Selection | None,
    rows: DecodeRows,
    state: RowState,
    page_size: int,
    width: int,
    tail_below: int,
    waits: bool,
) -> DiffTables:
    """See :func:`hisparse.kernels.diff_tables`."""
    pages, lengths, dense = with_dense_requests(selection, rows, width)
    diff = _in_rounds(pages, rows, state)
    if rows.counts is not None:
        malformed = _malformed(diff, lengths, rows.num_real_rows)
        counts = (diff.num_hits, diff.num_misses.clamp(min=0), malformed)
        rows.counts.add_(torch.stack([x.sum() for x in counts]))
    attended = _pages_of(state.device_pages, rows.rows, diff.current)
    absent = _lacks_page(attended, lengths)
    lengths = lengths.masked_fill(absent, 0)
    has_tail = (lengths < tail_below) | (rows.tail_lens < page_size)
    if dense is not None:
        has_tail |= dense
    if not waits:
        attended, lengths = _drop(attended, lengths, diff.missed.bool())
    attended = pad(attended.masked_fill(absent[:, None], -1), (0, 1), value=-1)
    attended.scatter_(1, lengths[:, None].long(), rows.tail_pages[:, None])
    tail_lens = torch.where(has_tail, rows.tail_lens, 0)
    loads = _pages_of(state.device_pages, rows.rows, diff.load_slots)
    return DiffTables(
        attended,
        tail_lens + lengths * page_size,
        loads,
        diff.load_host_pages,
        diff.num_hits,
        diff.num_misses,
    )


def _drop(pages: Tensor, lengths: Tensor, missed: Tensor) -> tuple[Tensor, Tensor]:
    """``pages [R, K]`` and ``lengths [R]`` without the entries ``missed [R, K] bool``."""
    dropped, order = missed.sort(dim=1, stable=True)
    entry = torch.arange(pages.shape[1], device=lengths.device)
    left = lengths - (missed & (entry < lengths[:, None])).sum(1, dtype=torch.int32)
    return pages.gather(1, order).masked_fill(dropped, -1), left


def _lacks_page(pages: Tensor, lengths: Tensor) -> Tensor:
    """``[R] bool``, rows without a page at one of the first ``lengths`` entries."""
    entry = torch.arange(pages.shape[1], device=lengths.device)
    absent = ((pages < 0) & (entry < lengths[:, None])).any(1)
    return absent | (lengths < 0) | (lengths > pages.shape[1])


def _malformed(diff: _LruDiff, lengths: Tensor, num_real_rows: Tensor) -> Tensor:
    """``[R] bool``, real rows with a duplicate, a gap, a page too many, or that were refused."""
    rows, width = diff.current.shape
    entry = torch.arange(width, device=lengths.device)
    misplaced = (diff.current >= 0) != (entry < lengths[:, None])
    wrong = misplaced.any(1) | (diff.num_hits + diff.num_misses != lengths)
    return wrong & (torch.arange(rows, device=lengths.device) < num_real_rows)


def _pages_of(device_pages: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """Device pages of ``slots [R, K]``, -1 where there is no slot; ``device_pages [NR, C]``."""
    return device_pages[rows[:, None], slots.clamp(min=0)].masked_fill(slots < 0, -1)
