"""Replays the selections of a trace through caches: their hits, and the bytes that they read.

All pages of a selection are resident at once: hits are counted before the step, and no page that is
selected is evicted, as in :func:`hisparse.kernels.diff_tables`. A stream starts with the most
recent complete pages of its context in the cache, as after a prefill; pages that are completed
between two selections enter it as the hottest.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hisparse.errors import ConfigError
from hisparse.trace.file import SelectionTrace

#: Tokens of the buffers that are replayed if none are named.
USUAL_BUFFERS = [2048, 4096, 8192]


#: Steps of a request in one row: the selected pages, and how many pages are complete.
Stream = Sequence[tuple[np.ndarray, int]]


def streams(trace: SelectionTrace, layer_id: int) -> Iterator[Stream]:
    """The selections of a layer, a stream for each request and head."""
    layer, full = trace.layer(layer_id), trace.full_pages.tolist()
    order = trace.requests.argsort(kind="stable")
    firsts = np.flatnonzero(np.diff(trace.requests[order]))
    for visits in np.split(order, firsts + 1):
        for head in range(layer.shape[1]):
            yield [(row[row >= 0], full[at]) for at in visits for row in [layer[at, head]]]


def replay_hits(trace: SelectionTrace, buffers: Sequence[int]) -> dict[str, list[Any]]:
    """Replay a trace through buffers of N sizes.

    Args:
        buffers: tokens of a row's buffer, each enough for the longest selection.

    Returns:
        For each buffer ``hits``; ``hit_ratio``, hits for each selected page;
        ``hit_ratio_by_layer``, ``[N][L]``; and ``bytes_per_step``, bytes that a decode step of one
        request reads from host memory, on average.
    """
    header = trace.header
    sizes = [tokens // header.page_size for tokens in buffers]
    hits = np.array(
        [
            np.sum([[count_hits(x, size) for size in sizes] for x in streams(trace, layer)], 0)
            for layer in header.layers
        ]
    )
    selected = _selected(trace)[:, None]
    # A missing page is read in each layer that attends the selection.
    read = (selected - hits) * (header.page_bytes * np.array(header.attended_by)[:, None])
    return {
        "hits": hits.sum(axis=0).tolist(),
        "hit_ratio": (hits.sum(axis=0) / max(1, selected.sum())).tolist(),
        "hit_ratio_by_layer": (hits / selected.clip(min=1)).T.tolist(),
        "bytes_per_step": (read.sum(axis=0) / len(trace.requests)).tolist(),
    }


def _selected(trace: SelectionTrace) -> np.ndarray:
    """``[L] int64``, selected pages."""
    return np.array([(trace.layer(x) >= 0).sum() for x in trace.header.layers])


def count_hits(stream: Stream, size: int) -> int:
    """Hits of a stream in a cache of ``size`` pages, in the exact order of ``diff_tables``.

    Args:
        stream: its selections; with no complete page it starts with an empty cache.
        size: pages of the cache, at least those of the longest selection.
    """
    num_pages = max(max(full, int(pages.max(initial=-1)) + 1) for pages, full in stream)
    order = np.empty(0, np.int64)  # The coldest first.
    chosen, held = np.zeros((2, num_pages), bool)
    hits = before = 0
    for pages, full in stream:
        completed = np.arange(before, full)
        before = max(before, full)
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
        again = total = 0
        for stream in streams(trace, layer):
            for (before, _), (now, _) in pairwise(stream):
                again += int(np.isin(now, before).sum())
                total += len(now)
        found.append(again / total if total else None)
    return found


def least_buffer(trace: SelectionTrace) -> int:
    """Tokens of the smallest buffer that can hold every selection."""
    widest = max(int((trace.layer(x) >= 0).sum(-1).max()) for x in trace.header.layers)
    return max(1, widest) * trace.header.page_size


def describe(file: Path, trace: SelectionTrace) -> dict[str, Any]:
    """What a trace holds."""
    header, pages = trace.header, int(_selected(trace).sum())
    return {
        "file": str(file),
        "note": header.note,
        "algorithm": header.algorithm,
        "scope": header.scope,
        "page_size": header.page_size,
        "layers": len(header.layers),
        "heads": header.heads,
        "requests": int(trace.requests.max()) + 1,
        "request_steps": len(trace.requests),
        "context": [int(trace.seq_lens.min()), int(trace.seq_lens.max())],
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
    trace = SelectionTrace(file)
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
