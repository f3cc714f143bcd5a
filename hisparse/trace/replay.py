"""Hit ratios and bytes of caches that a trace's selections would have had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hisparse.errors import ConfigError
from hisparse.trace.policies import Selections, count_hits, stack_depths
from hisparse.trace.reader import SelectionTrace

#: Tokens of the buffers that are replayed if none are named.
USUAL_BUFFERS = [2048, 4096, 8192]


@dataclass(frozen=True, kw_only=True)
class HitCurve:
    """Hits of an LRU cache of every size.

    Attributes:
        page_size: S, tokens.
        hits: ``[L, H, C + 1] int64``, hits in a cache of 0 to C pages.
        accesses: ``[L, H] int64``, selected pages.
        widest: pages of the longest selection; smaller caches cannot hold it.
        read_bytes: ``[L]``, bytes that a missing page reads, over the layers that attend it.
        steps: visits of the trace.
    """

    page_size: int
    hits: np.ndarray
    accesses: np.ndarray
    widest: int
    read_bytes: np.ndarray
    steps: int

    @property
    def least_tokens(self) -> int:
        """Tokens of the smallest cache that can hold every selection."""
        return self.widest * self.page_size

    def hit_ratio(self, tokens: int) -> float:
        """Hits for each selected page, with a buffer of ``tokens`` in each row and layer.

        Raises:
            ConfigError: the buffer cannot hold the longest selection.
        """
        hits = self._hits(tokens).sum(axis=(0, 1))
        return float(hits / max(1, self.accesses.sum()))

    def bytes_per_step(self, tokens: int) -> float:
        """Bytes that a decode step of one request reads from host memory, on average."""
        misses = (self.accesses - self._hits(tokens)).sum(axis=1)
        return float((misses * self.read_bytes).sum() / self.steps)

    def tokens_for(self, hit_ratio: float, least: int = 0) -> int | None:
        """The smallest buffer of ``least`` tokens or more with a hit ratio; None: there is none."""
        ratios = self.hits.sum(axis=(0, 1)) / max(1, self.accesses.sum())
        first = max(self.widest, -(-least // self.page_size))
        reached = np.flatnonzero(ratios[first:] >= hit_ratio)
        if first >= len(ratios):
            return first * self.page_size if ratios[-1] >= hit_ratio else None
        return int(first + reached[0]) * self.page_size if len(reached) else None

    def _hits(self, tokens: int) -> np.ndarray:
        if tokens < self.least_tokens:
            raise ConfigError(
                f"buffer: got {tokens} tokens, expected at least the {self.least_tokens} of the "
                "longest selection"
            )
        at = min(tokens // self.page_size, self.hits.shape[-1] - 1)
        hits: np.ndarray = self.hits[..., at]
        return hits


def lru_curve(trace: SelectionTrace) -> HitCurve:
    """Replay a trace through LRU caches of all sizes, in one pass for each layer."""
    header = trace.header
    depth = int(trace.full_pages.max()) + 1
    hits = np.zeros((len(header.layers), header.heads, depth + 1), np.int64)
    accesses = np.zeros(hits.shape[:2], np.int64)
    widest = 1
    for at, layer in enumerate(header.layers):
        selections, heads = trace.selections(layer)
        counts = stack_depths(selections, depth)
        by_head = np.zeros((header.heads, depth + 1), np.int64)
        np.add.at(by_head, heads, counts)
        # A page at depth d is in each cache of more than d pages.
        hits[at, :, 1:] = by_head[:, :-1].cumsum(axis=1)
        accesses[at] = by_head.sum(axis=1)
        widest = max(widest, selections.widest)
    return HitCurve(
        page_size=header.page_size,
        hits=hits,
        accesses=accesses,
        widest=widest,
        read_bytes=header.page_bytes * np.array(header.attended_by),
        steps=len(trace.visits.requests),
    )


def policy_hits(trace: SelectionTrace, policy: str, buffers: Sequence[int]) -> np.ndarray:
    """Hits of a replacement policy.

    Args:
        trace: the trace.
        policy: one of ``POLICIES``.
        buffers: tokens of a row's buffer, each enough for the longest selection.

    Returns:
        ``[L, H, len(buffers)] int64``.
    """
    header = trace.header
    sizes = [tokens // header.page_size for tokens in buffers]
    hits = np.zeros((len(header.layers), header.heads, len(sizes)), np.int64)
    for at, layer in enumerate(header.layers):
        selections, heads = trace.selections(layer)
        np.add.at(hits[at], heads, count_hits(selections, policy, sizes))
    return hits


def adjacent_overlap(trace: SelectionTrace) -> np.ndarray:
    """``[L, H]``, the fraction of a step's selected pages that the step before selected too.

    NaN where no request has two steps in a row.
    """
    header = trace.header
    found = np.full((len(header.layers), header.heads), np.nan)
    for at, layer in enumerate(header.layers):
        selections, heads = trace.selections(layer)
        again, total = _overlap(selections)
        by_stream = selections.streams[:-1]
        for head in range(header.heads):
            of_head = heads == head
            pages = int(np.add.reduceat(total, by_stream)[of_head].sum())
            shared = int(np.add.reduceat(again, by_stream)[of_head].sum())
            found[at, head] = shared / pages if pages else np.nan
    return found


def _overlap(selections: Selections) -> tuple[np.ndarray, np.ndarray]:
    """``[M]``: pages that the selection before had, and pages; 0 for the first of a stream."""
    count = len(selections.full_pages)
    sizes = np.diff(selections.offsets)
    row = np.repeat(np.arange(count), sizes)
    # A page and its selection as one number; the next selection's is larger by the stride.
    stride = selections.num_pages
    keys = row * stride + selections.pages
    held = np.isin(keys - stride, keys)
    first = np.zeros(count, bool)
    first[selections.streams[:-1]] = True
    again = np.bincount(row[held & ~first[row]], minlength=count)
    return again, np.where(first, 0, sizes)


def describe(file: Path, trace: SelectionTrace) -> dict[str, Any]:
    """What a trace holds."""
    header, visits = trace.header, trace.visits
    pages = sum(int(trace.layer(x).lengths.sum()) for x in header.layers)
    return {
        "file": str(file),
        "source": header.source,
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
    known = overlap[overlap == overlap]
    return {
        "adjacent_overlap": float(known.mean()) if known.size else None,
        "adjacent_overlap_by_layer": [
            float(row[row == row].mean()) if (row == row).any() else None for row in overlap
        ],
    }


def _curve_points(curve: HitCurve) -> list[dict[str, float]]:
    """The LRU curve at powers of two of tokens, from the smallest buffer to the whole context."""
    largest = (curve.hits.shape[-1] - 1) * curve.page_size
    tokens, points = curve.least_tokens, []
    while tokens < largest:
        points.append(tokens)
        tokens *= 2
    return [
        {
            "buffer": tokens,
            "hit_ratio": curve.hit_ratio(tokens),
            "bytes_per_step": curve.bytes_per_step(tokens),
        }
        for tokens in [*points, largest]
    ]


def tokens_for(hit_ratio: float, curve: HitCurve, about: dict[str, Any]) -> int:
    """The smallest ``device_buffer_size`` with a hit ratio.

    Raises:
        ConfigError: there is none.
    """
    budget = about["settings"].get("budget")
    # A row holds the budget at least, the page being filled included.
    tokens = curve.tokens_for(hit_ratio, budget if isinstance(budget, int) else 0)
    if tokens is None:
        whole = (curve.hits.shape[-1] - 1) * curve.page_size
        raise ConfigError(
            f"--hit-ratio: got {hit_ratio}, expected at most {curve.hit_ratio(whole):.4f}, which "
            f"{about['file']!r} has with all of its pages on the device"
        )
    return tokens


def replay_trace(
    file: Path, policies: Sequence[str], given: Sequence[int] | None, *, by_head: bool
) -> dict[str, Any]:
    """Replay a trace: what it holds, and hit ratios and bytes by policy and buffer.

    Args:
        file: the trace.
        policies: of ``POLICIES``.
        given: tokens of the buffers; None: the usual ones that hold the longest selection.
        by_head: also the hit ratios of each head.

    Raises:
        ConfigError: the file is damaged, or a buffer is too small.
    """
    with SelectionTrace(file) as trace:
        curve = lru_curve(trace)
        buffers = _buffers(given, curve.least_tokens, file)
        accesses = max(1, int(curve.accesses.sum()))
        about = describe(file, trace) | overlaps(trace)
        about |= {"buffers": buffers, "policies": {}, "curve": _curve_points(curve)}
        for policy in policies:
            hits = policy_hits(trace, policy, buffers)
            misses = (curve.accesses[..., None] - hits).sum(axis=1)
            read = (misses * curve.read_bytes[:, None]).sum(axis=0) / curve.steps
            by_layer = hits.sum(axis=1) / curve.accesses.sum(axis=1).clip(min=1)[:, None]
            about["policies"][policy] = {
                "hit_ratio": (hits.sum(axis=(0, 1)) / accesses).tolist(),
                "bytes_per_step": read.tolist(),
                "hit_ratio_by_layer": by_layer.T.tolist(),
            }
            if by_head:
                ratios = hits / curve.accesses.clip(min=1)[..., None]
                about["policies"][policy]["hit_ratio_by_head"] = ratios.transpose(2, 0, 1).tolist()
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
