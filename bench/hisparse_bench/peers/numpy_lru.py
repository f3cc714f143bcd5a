"""``lru_diff`` in vectorised numpy, as written by hand without a compiler."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


def lru_diff(
    selection: Ints, host_pages: Ints, capacity: Ints, slot_pages: Ints, lru_order: Ints
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """:func:`hisparse.kernels.lru_diff`, row by row, vectorised within a row.

    Args:
        selection: ``[R, K]``.
        host_pages: ``[R, Pmax]``.
        capacity: ``[R]``.
        slot_pages: ``[R, C]``, updated.
        lru_order: ``[R, C]``, updated.

    Returns:
        ``curr_device_slots``, ``load_host_pages``, ``load_device_slots`` ``[R, K]``, ``num_hits``
        and ``num_misses`` ``[R]``.
    """
    rows, width = selection.shape
    current = np.full((rows, width), -1, np.int32)
    load_host, load_slots = current.copy(), current.copy()
    hits, misses = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    slot_of = np.empty(host_pages.shape[1] + 1, np.int32)  # The last entry is for "no page".
    first_entry = np.empty_like(slot_of)
    for r in range(rows):
        pages, order = selection[r], lru_order[r, : capacity[r]]
        held = slot_pages[r, order]
        slot_of.fill(-1)
        slot_of[held[held >= 0]] = order[held >= 0]
        slot_of[-1] = -1
        # Of equal indices a scatter keeps the last one, so reverse to get a page's first entry.
        first_entry[pages[::-1]] = np.arange(width - 1, -1, -1, dtype=np.int32)
        is_first = (first_entry[pages] == np.arange(width)) & (pages >= 0)
        slots = slot_of[pages]
        new = pages[is_first & (slots < 0)]
        selected = np.zeros(slot_pages.shape[1] + 1, np.bool_)
        selected[slots] = True
        is_hit = selected[order]
        others = order[~is_hit]
        victims = others[: new.size]
        slot_of[new] = victims
        current[r] = slot_of[pages]
        load_host[r, : new.size] = host_pages[r, new]
        load_slots[r, : new.size] = victims
        slot_pages[r, victims] = new
        lru_order[r, : capacity[r]] = np.concatenate([others[new.size :], victims, order[is_hit]])
        misses[r] = new.size
        hits[r] = np.count_nonzero(is_first) - new.size
    return current, load_host, load_slots, hits, misses
