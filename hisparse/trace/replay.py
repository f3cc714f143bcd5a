"""Replays the selections of a trace through caches: their hits, and the bytes that they read.

All pages of a selection are resident at once: hits are counted before the step, and no page that is
selected is evicted, as in :func:`hisparse.kernels.diff_tables`. A stream starts with the most
recent complete pages of its context in the cache, as after a prefill; pages that are completed
between two selections enter it as the hottest.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hisparse.errors import ConfigError
from hisparse.trace.reader import Selections, SelectionTrace

#: Tokens of the buffers that are replayed if none are named.
USUAL_BUFFERS = [2048, 4096, 8192]


def replay_hits(trace: SelectionTrace, buffers: Sequence[int]) -> dict[str, list[Any]]:
    """Replay a trace through buffers of N sizes.

    Args:
        trace: the trace.
        buffers: tokens of a row's buffer, each enough for the longest selection.

    Returns:
        For each buffer ``hits``; ``hit_ratio``, hits for each selected page;
        ``hit_ratio_by_layer``, ``[N][L]``; and ``bytes_per_step``, bytes that a decode step of one
        request reads from host memory, on average.
    """
    header = trace.header
    sizes = [tokens // header.page_size for tokens in buffers]
    hits = np.zeros((len(header.layers), len(sizes)), np.int64)
    selected = np.zeros((len(header.layers), 1), np.int64)
    for at, layer in enumerate(header.layers):
        selections = trace.selections(layer)
        hits[at] = count_hits(selections, sizes).sum(axis=0)
        selected[at] = len(selections.pages)
    # A missing page is read in each layer that attends the selection.
    read = (selected - hits) * (header.page_bytes * np.array(header.attended_by)[:, None])
    return {
        "hits": hits.sum(axis=0).tolist(),
        "hit_ratio": (hits.sum(axis=0) / max(1, selected.sum())).tolist(),
        "hit_ratio_by_layer": (hits / selected.clip(min=1)).T.tolist(),
        "bytes_per_step": (read.sum(axis=0) / len(trace.visits.requests)).tolist(),
    }


def count_hits(selections: Selections, sizes: Sequence[int]) -> np.ndarray:
    """Count the hits of caches of several sizes, which evict the coldest pages.

    Args:
        selections: the selections.
        sizes: pages of each cache, at least those of the longest selection.

    Returns:
        ``[S, len(sizes)] int64``, selected pages that were in the cache.
    """
    streams = range(len(selections.streams) - 1)
    return np.array([[_hits(selections, x, size) for size in sizes] for x in streams], np.int64)


def _hits(selections: Selections, stream: int, size: int) -> int:
    """Hits of a stream in the exact order of ``diff_tables``."""
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


def adjacent_overlap(trace: SelectionTrace) -> list[float | None]:
    """``[L]``, the fraction of a step's selected pages that the step before selected too.

    None where no request has two steps in a row.
    """
    found: list[float | None] = []
    for layer in trace.header.layers:
        selections = trace.selections(layer)
        # The selection and the stream of each page.
        row = np.repeat(np.arange(len(selections.full_pages)), np.diff(selections.offsets))
        lengths = np.diff(selections.streams)
        stream = np.repeat(np.arange(len(lengths)), lengths)[row]
        # A page and its selection as one number; the next selection's is larger by the stride.
        keys = row * selections.num_pages + selections.pages
        again = np.isin(keys - selections.num_pages, keys)
        follows = row != selections.streams[stream]
        found.append(float(again[follows].mean()) if follows.any() else None)
    return found


def least_buffer(trace: SelectionTrace) -> int:
    """Tokens of the smallest buffer that can hold every selection."""
    widest = max(int(trace.layer(x).lengths.max()) for x in trace.header.layers)
    return max(1, widest) * trace.header.page_size


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


def replay_trace(file: Path, given: Sequence[int] | None) -> dict[str, Any]:
    """Replay a trace: what it holds, and hit ratios and bytes by buffer.

    Args:
        file: the trace.
        given: tokens of the buffers; None: the usual ones that hold the longest selection, or as
            many tokens as that has.

    Raises:
        ConfigError: the file is damaged, or a buffer is too small.
    """
    with SelectionTrace(file) as trace:
        least = least_buffer(trace)
        buffers = list(given or [x for x in USUAL_BUFFERS if x >= least] or [least])
        if min(buffers) < least:
            raise ConfigError(
                f"--device-buffer-size: got {', '.join(map(str, buffers))}, expected at least the "
                f"{least} tokens of the longest selection in {str(file)!r}"
            )
        by_layer = adjacent_overlap(trace)
        known = [x for x in by_layer if x is not None]
        return describe(file, trace) | {
            "adjacent_overlap": sum(known) / len(known) if known else None,
            "adjacent_overlap_by_layer": by_layer,
            "buffers": buffers,
            "policies": {"lru": replay_hits(trace, buffers)},
        }
