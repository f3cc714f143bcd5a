"""Trace files with random selections."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from hisparse.trace.file import RecordedStep, TraceHeader, TraceWriter

#: Pages of 16 tokens, of which a selection has 7.
HEADER = TraceHeader(
    note="random",
    algorithm="quest",
    scope="kv_head",
    page_size=16,
    page_bytes=4096,
    heads=2,
    max_pages=7,
    layers=(0, 1),
    attended_by=(1, 1),
    settings={"budget": 128},
)


def write_trace(path: Path, *, steps: int = 20, requests: int = 1) -> Path:
    """Write a trace of contexts of 600 tokens, in which 5 of 7 pages are selected again.

    Args:
        path: the file.
        steps: decode steps of each request.
        requests: requests, side by side.
    """
    rng, width = np.random.default_rng(0), HEADER.max_pages
    chosen = np.full((len(HEADER.layers), requests, HEADER.heads, width), -1, np.int32)
    writer = TraceWriter(path, HEADER, 1 << 30)
    for step in range(steps):
        full = (600 + step) // HEADER.page_size
        for at in np.ndindex(chosen.shape[:3]):
            last = chosen[at]
            old = rng.choice(last, 5 if step else 0, replace=False)
            new = rng.choice(np.setdiff1d(np.arange(full), last), width - len(old), replace=False)
            chosen[at] = np.sort(np.concatenate([old, new]))
        seq_lens = np.full(requests, 601 + step)
        recorded = RecordedStep(np.arange(requests), seq_lens, torch.from_numpy(chosen.copy()))
        assert writer.put(recorded)
        if step % 32 == 31:  # The writer drops steps if many wait.
            writer.flush()
    writer.close()
    return path
