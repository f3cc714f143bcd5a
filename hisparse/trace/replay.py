"""Replays the selections of a trace through caches: their hits, and the bytes that they read.

All pages of a selection are resident at once: hits are counted before the step, and no page that is
selected is evicted, as in :func:`hisparse.kernels.lru_diff`. A stream starts with the most recent
complete pages of its context in the cache, as after a prefill; pages that are completed between two
selections enter it as the hottest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hisparse.errors import ConfigError
from hisparse.trace.reader import Selections, SelectionTrace

#: Tokens of the buffers that are replayed if none are named.
USUAL_BUFFERS = [2048, 4096, 8192]


@dataclass(frozen=True, kw_only=True)
class Hits:
    """Hits of a replacement policy in buffers of N sizes.

    Attributes:
        hits: ``[L, H, N] int64``.
        accesses: ``[L, H] int64``, selected pages.
        read_bytes: ``[L]``, bytes that a missing page reads, over the layers that attend it.
        steps: visits of the trace.
    """

    hits: np.ndarray
    accesses: np.ndarray
    read_bytes: np.ndarray
    steps: int

    @property
    def ratio(self) -> list[float]:
        """``[N]``, hits for each selected page."""
        found = self.hits.sum(axis=(0, 1)) / max(1, self.accesses.sum())
        return [float(x) for x in found]

    @property
    def ratio_by_layer(self) -> list[list[float]]:
        """``[N, L]``."""
        accesses = self.accesses.sum(axis=1).clip(min=1)
        by_layer: list[list[float]] = (self.hits.sum(axis=1) / accesses[:, None]).T.tolist()
        return by_layer

    @property
    def bytes_per_step(self) -> list[float]:
        """``[N]``, bytes that a decode step of one request reads from host memory, on average."""
        misses = (self.accesses[..., None] - self.hits).sum(axis=1)
        read = (misses * self.read_bytes[:, None]).sum(axis=0) / self.steps
        return [float(x) for x in read]


def replay_hits(trace: SelectionTrace, policy: str, buffers: Sequence[int]) -> Hits:
    """Replay a trace.

    Args:
        trace: the trace.
        policy: one of ``POLICIES``.
        buffers: tokens of a row's buffer, each enough for the longest selection.
    """
    header = trace.header
    sizes = [tokens // header.page_size for tokens in buffers]
    hits = np.zeros((len(header.layers), header.heads, len(sizes)), np.int64)
    accesses = np.zeros(hits.shape[:2], np.int64)
    for at, layer in enumerate(header.layers):
        selections, heads = trace.selections(layer)
        np.add.at(hits[at], heads, count_hits(selections, policy, sizes))
        np.add.at(accesses[at], heads, np.diff(selections.offsets[selections.streams]))
    read_bytes = header.page_bytes * np.array(header.attended_by)
    return Hits(hits=hits, accesses=accesses, read_bytes=read_bytes, steps=len(trace.visits[0]))


def count_hits(selections: Selections, policy: str, sizes: Sequence[int]) -> np.ndarray:
    """Count the hits of a replacement policy in caches of several sizes.

    Args:
        selections: the selections.
        policy: one of ``POLICIES``.
        sizes: pages of each cache, at least those of the longest selection.

    Returns:
        ``[S, len(sizes)] int64``, selected pages that were in the cache.
    """
    streams = range(len(selections.streams) - 1)
    run = POLICIES[policy]
    return np.array([[run(selections, x, size) for size in sizes] for x in streams], np.int64)


def _lru(selections: Selections, stream: int, size: int) -> int:
    """Evict the coldest pages: the exact order of ``lru_diff``."""
    order = np.empty(0, np.int64)  # The coldest first.
    chosen, held = np.zeros((2, selections.num_pages), bool)
    hits = 0
    for pages, completed in selections.steps(stream):
        order = np.concatenate([order, completed[~held[completed]]])[-size:]
        held[:] = False
        held[order] = chosen[pages] = True
        misses, again = pages[~held[pages]], chosen[order]
        spare = order[~again][max(0, len(order) + len(misses) - size) :]
        order = np.concatenate([spare, misses, order[again]])
        hits += len(pages) - len(misses)
        chosen[pages] = False
    return hits


def _belady(selections: Selections, stream: int, size: int) -> int:
    """Evict the page that is selected last of all, so that no policy hits more often."""
    steps = list(selections.steps(stream))
    chosen, held = np.zeros((2, selections.num_pages), bool)
    # Of each page, the step that selects it next; after all steps: none does.
    upcoming = np.full(selections.num_pages, len(steps))
    later = []
    for at, (pages, _) in reversed(list(enumerate(steps))):
        later.append(upcoming[pages])
        upcoming[pages] = at

    def evict(count: int) -> None:
        if count > 0:
            spare = np.flatnonzero(held & ~chosen)
            # Of pages that are selected in the same step, the last one goes first.
            rank = upcoming[spare] * len(held) + spare
            held[spare[rank.argpartition(-count)[-count:]]] = False

    hits = 0
    for at, (pages, completed) in enumerate(steps):
        for page in completed[-size:] if at == 0 else completed:
            evict(held.sum() - size + (not held[page]))
            held[page] = True
        hits += int(held[pages].sum())
        chosen[pages] = True
        evict((held | chosen).sum() - size)
        held[pages] = True
        chosen[pages], upcoming[pages] = False, later.pop()
    return hits


#: Replacement policies by name: the hits of a stream in a cache of a size.
POLICIES: dict[str, Callable[[Selections, int, int], int]] = {"lru": _lru, "belady": _belady}


def adjacent_overlap(trace: SelectionTrace) -> np.ndarray:
    """``[L, H]``, the fraction of a step's selected pages that the step before selected too.

    NaN where no request has two steps in a row.
    """
    found = np.full((len(trace.header.layers), trace.header.heads), np.nan)
    for at, layer in enumerate(trace.header.layers):
        selections, heads = trace.selections(layer)
        # The selection and the stream of each page.
        row = np.repeat(np.arange(len(selections.full_pages)), np.diff(selections.offsets))
        stream = np.repeat(np.arange(len(heads)), np.diff(selections.streams))[row]
        # A page and its selection as one number; the next selection's is larger by the stride.
        keys = row * selections.num_pages + selections.pages
        again = np.isin(keys - selections.num_pages, keys)
        follows = row != selections.streams[stream]
        pages, shared = (
            np.bincount(heads[stream[x]], minlength=trace.header.heads)
            for x in (follows, follows & again)
        )
        np.divide(shared, pages, out=found[at], where=pages > 0)
    return found


def least_buffer(trace: SelectionTrace) -> int:
    """Tokens of the smallest buffer that can hold every selection."""
    widest = max(int(trace.layer(x).lengths.max()) for x in trace.header.layers)
    return max(1, widest) * trace.header.page_size


def _whole(trace: SelectionTrace) -> int:
    """Tokens of a buffer for all complete pages of the longest context."""
    return (int(trace.full_pages.max()) + 1) * trace.header.page_size


def describe(file: Path, trace: SelectionTrace) -> dict[str, Any]:
    """What a trace holds."""
    header, visits = trace.header, trace.visits
    pages = sum(int(trace.layer(x).lengths.sum()) for x in header.layers)
    return {
        "file": str(file),
        "note": header.note,
        "algorithm": header.algorithm,
        "scope": header.scope,
        "page_size": header.page_size,
        "layers": len(header.layers),
        "heads": header.heads,
        "requests": int(visits.requests.max()) + 1,
        "request_steps": len(visits.requests),
        "context": [int(visits.seq_lens.min()), int(visits.seq_lens.max())],
        "selected_pages": pages,
        "bytes": trace.num_bytes,
        "bytes_per_page": trace.num_bytes / max(1, pages),
        "dropped_steps": None if trace.end is None else trace.end.dropped_steps,
        "ended": "early, as a process that is killed" if trace.end is None else trace.end.reason,
        "settings": dict(header.settings),
        "version": header.version,
        "started": header.started,
    }


def overlaps(trace: SelectionTrace) -> dict[str, Any]:
    """Share of a selection that was in that of the step before, of all layers and of each."""
    overlap = adjacent_overlap(trace)

    def mean(x: np.ndarray) -> float | None:
        known = x[~np.isnan(x)]
        return float(known.mean()) if known.size else None

    return {
        "adjacent_overlap": mean(overlap),
        "adjacent_overlap_by_layer": [mean(row) for row in overlap],
    }


def recommend(file: Path, hit_ratio: float) -> dict[str, Any]:
    """The smallest ``device_buffer_size`` with at least this hit ratio, and what a trace holds.

    Raises:
        ConfigError: the file is damaged.
    """
    with SelectionTrace(file) as trace:
        about, size = describe(file, trace), trace.header.page_size
        budget = about["settings"].get("budget")
        # A row holds the budget at least, the page being filled included.
        least = max(least_buffer(trace), budget if isinstance(budget, int) else 0)
        low = -(-least // size)
        # A buffer for the whole context starts with it and misses nothing.
        buffers = range(low * size, max(low * size, _whole(trace)), size)
        enough = bisect_left(
            buffers, hit_ratio, key=lambda tokens: replay_hits(trace, "lru", [tokens]).ratio[0]
        )
        tokens = low * size + enough * size
        best = replay_hits(trace, "lru", [tokens])
    return about | {
        "device_buffer_size": tokens,
        "hit_ratio": best.ratio[0],
        "bytes_per_step": best.bytes_per_step[0],
    }


def replay_trace(
    file: Path, policies: Sequence[str], given: Sequence[int] | None
) -> dict[str, Any]:
    """Replay a trace: what it holds, and hit ratios and bytes by policy and buffer.

    Args:
        file: the trace.
        policies: of ``POLICIES``.
        given: tokens of the buffers; None: the usual ones that hold the longest selection.

    Raises:
        ConfigError: the file is damaged, or a buffer is too small.
    """
    with SelectionTrace(file) as trace:
        buffers = _buffers(given, least_buffer(trace), file)
        about = describe(file, trace) | overlaps(trace) | {"buffers": buffers, "policies": {}}
        for policy in policies:
            found = replay_hits(trace, policy, buffers)
            about["policies"][policy] = {
                "hit_ratio": found.ratio,
                "bytes_per_step": found.bytes_per_step,
                "hit_ratio_by_layer": found.ratio_by_layer,
            }
    return about


def _buffers(given: Sequence[int] | None, least: int, file: Path) -> list[int]:
    """Tokens of the buffers to replay: those that were given, or the usual ones that are enough.

    Raises:
        ConfigError: a buffer that was given, or each of the usual ones, is too small.
    """
    enough = [tokens for tokens in given or USUAL_BUFFERS if tokens >= least]
    if not enough or (given and len(enough) < len(given)):
        raise ConfigError(
            f"--device-buffer-size: got {', '.join(map(str, given or USUAL_BUFFERS))}, expected at "
            f"least the {least} tokens of the longest selection in {str(file)!r}"
        )
    return enough
