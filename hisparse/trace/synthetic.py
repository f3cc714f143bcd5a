"""Traces that are made up, from an overlap of adjacent steps and a Zipf distribution of pages."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch

from hisparse import __version__
from hisparse.errors import ConfigError
from hisparse.trace.format import TraceHeader
from hisparse.trace.writer import RecordedStep, TraceWriter
from hisparse.types import SelectionScope


@dataclass(frozen=True, kw_only=True)
class MadeUpTrace:
    """A generator of selections. No model has made them: the file and each output say so.

    In each step a row keeps a random part of its last selection. The rest are pages that the last
    selection did not have, drawn by a Zipf distribution over an order of the pages that each row
    has for itself.

    Attributes:
        context: tokens before the first step.
        budget: tokens attended per step and row.
        overlap: fraction of a selection that the step before had too.
        zipf: exponent; 0 draws all pages alike.
        steps: decode steps.
        requests: requests, side by side.
        layers, heads: rows of a request.
        page_size: S, tokens.
        token_bytes: K and V of a token in one row and layer.
        seed: of the generator.
    """

    context: int
    budget: int
    overlap: float
    zipf: float = 1.0
    steps: int = 256
    requests: int = 1
    layers: int = 4
    heads: int = 2
    page_size: int = 16
    token_bytes: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.overlap <= 1:
            raise ConfigError(f"--overlap: got {self.overlap}, expected a fraction from 0 to 1")
        if not 0 <= self.zipf <= 10:
            raise ConfigError(f"--zipf: got {self.zipf}, expected an exponent from 0 to 10")
        least = self._width + self._new
        if self._width < 1 or self.context // self.page_size < least:
            raise ConfigError(
                f"--context, --budget: got {self.context} and {self.budget}, expected a budget of "
                f"at least {2 * self.page_size} and a context of at least "
                f"{max(1, least) * self.page_size} tokens"
            )

    @property
    def _width(self) -> int:
        """K: the tail page is a part of the budget."""
        return self.budget // self.page_size - 1

    @property
    def _new(self) -> int:
        return self._width - round(self.overlap * self._width)

    def write(self, path: Path, max_bytes: int = 1 << 30) -> Path:
        """Write the trace; returns the file, which has another name if ``path`` exists.

        Raises:
            ConfigError: the file cannot be created.
        """
        scope: SelectionScope = "layer" if self.heads == 1 else "kv_head"
        header = TraceHeader(
            source="made up",
            note=", ".join(f"{name} {value:g}" for name, value in asdict(self).items()),
            algorithm="made up",
            scope=scope,
            page_size=self.page_size,
            page_bytes=self.page_size * self.token_bytes,
            heads=self.heads,
            max_pages=self._width,
            layers=tuple(range(self.layers)),
            attended_by=(1,) * self.layers,
            settings={"budget": self.budget},
            version=__version__,
            started=datetime.now(timezone.utc).isoformat("T", "seconds"),
        )
        writer = TraceWriter(path, header, max_bytes)
        try:
            self._generate(writer)
        finally:
            writer.close()
        return writer.path

    def _generate(self, writer: TraceWriter) -> None:
        rng, size = np.random.default_rng(self.seed), self.page_size
        rows = self.layers * self.requests * self.heads
        ranks = np.arange(-(-(self.context + self.steps) // size))
        weights = rng.permuted(np.tile(-self.zipf * np.log1p(ranks), (rows, 1)), axis=1)
        slots = np.arange(self.requests)
        chosen = np.zeros((rows, self.context // size), bool)
        for step in range(self.steps):
            full = (self.context + step) // size
            chosen = np.pad(chosen, ((0, 0), (0, full - chosen.shape[1])))
            # The pages with the largest sums are a draw without replacement (Gumbel).
            draw = weights[:, :full] + rng.gumbel(size=chosen.shape)
            kept = _best(np.where(chosen, rng.random(chosen.shape), -1.0), self._width - self._new)
            new = self._new if step else self._width
            drawn = _best(np.where(chosen, -np.inf, draw), new)
            chosen = drawn | (kept & chosen)
            pages = np.nonzero(chosen)[1].astype(np.int32)
            shape = (self.layers, self.requests, self.heads, self._width)
            seq_lens = np.full(self.requests, self.context + step + 1)
            recorded = RecordedStep(slots, seq_lens, torch.from_numpy(pages.reshape(shape)))
            if not writer.put(recorded, wait=True):
                break


def _best(scores: np.ndarray, count: int) -> np.ndarray:
    """``[R, P] bool``, the ``count`` largest of each row."""
    best = np.zeros(scores.shape, bool)
    if count:
        at = np.argpartition(-scores, count - 1, axis=1)[:, :count]
        np.put_along_axis(best, at, True, axis=1)
    return best
