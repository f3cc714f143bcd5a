"""``hisparse bench prefetch``: pages that a decode step waits for, with and without prefetch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hisparse.cache.counters import CacheStats
from hisparse_bench.options import Options
from hisparse_bench.report import Case
from hisparse_bench.timing import Candidate, timed_case

#: Steps before those that are timed.
WARMUPS = 8
_PLAIN = "off"


@dataclass(frozen=True, kw_only=True)
class PrefetchBench:
    """Decoding of a text by a real model, with each ``min_cosine`` and without prefetch.

    Attributes:
        model: a transformers model.
        ids: token ids of the text, ``context + WARMUPS + num_steps`` of them.
        context: tokens before the first step.
        budget: tokens attended per step; a row's device pages hold twice as many.
        algorithm: name of the algorithm that selects pages.
        min_cosines: values of the option ``min_cosine`` of ``prefetch``.
        num_steps: steps to time.
    """

    model: Any
    ids: Sequence[int]
    context: int
    budget: int
    algorithm: str
    min_cosines: Sequence[float]
    num_steps: int

    def run(self) -> Case:
        """Time all settings and count their pages.

        The gate compares the logits with ``min_cosine`` 1, where every prefetched selection is
        corrected, with those without prefetch, bit for bit.
        """
        checked = [self._reader({}), self._reader(_settings(1.0))]
        logits = [torch.stack([reader.read(t) for t in range(WARMUPS)]) for reader in checked]
        readers = {_PLAIN: self._reader({})} | {
            f"min_cosine {cosine:g}": self._reader(_settings(cosine)) for cosine in self.min_cosines
        }
        case = timed_case(
            "prefetch",
            {
                "context": self.context,
                "budget": self.budget,
                "algorithm": self.algorithm,
                "steps": self.num_steps,
            },
            {impl: Candidate(reader.read, reader.prepare) for impl, reader in readers.items()},
            Options(device=self.model.device, num_steps=self.num_steps),
            agrees=lambda: torch.equal(*logits),
            num_warmups=WARMUPS,
        )
        figures = {impl: reader.figures(self.num_steps) for impl, reader in readers.items()}
        for name in figures[_PLAIN]:
            case.params[name] = {impl: found[name] for impl, found in figures.items()}
        return case

    def _reader(self, prefetch: dict[str, Any]) -> _Reader:
        from hisparse.transformers import enable

        # Keep rows from growing: a single request would get its whole context on the device.
        settings: dict[str, Any] = {
            "algorithm": self.algorithm,
            "budget": self.budget,
            "max_row_capacity": 2 * self.budget,
        }
        cache = enable(self.model, settings | prefetch, max_length=len(self.ids))
        return _Reader(self.model, cache, self.ids, self.context)


def _settings(min_cosine: float) -> dict[str, Any]:
    return {"prefetch": {"min_cosine": min_cosine}}


class _Reader:
    """A cache that is fed the text."""

    def __init__(self, model: Any, cache: Any, ids: Sequence[int], context: int) -> None:
        self._cache = cache
        self._ids = torch.tensor([ids], device=model.device)
        self._context = context
        self._forward = partial(model, past_key_values=cache, logits_to_keep=1)
        with torch.no_grad():
            self._forward(self._ids[:, :context])
        self._before: CacheStats = cache.stats()

    def prepare(self, step: int) -> None:
        """Reset the counts after the warm-up."""
        if step == WARMUPS:
            self._before = self._cache.stats()

    def read(self, step: int) -> Tensor:
        """Feed one token; return the logits of the next."""
        at = self._context + step
        with torch.no_grad():
            logits: Tensor = self._forward(self._ids[:, at : at + 1]).logits
        return logits

    def figures(self, num_steps: int) -> dict[str, float]:
        """Pages per step, over all layers and rows."""
        now, before = self._cache.stats(), self._before
        late = now.miss_pages - before.miss_pages
        early = now.prefetched_pages - before.prefetched_pages
        hits = now.hit_pages - before.hit_pages
        prefetched, corrected = (
            now.extensions.get(name, 0) - before.extensions.get(name, 0)
            for name in ("prefetched_selections", "corrected_selections")
        )
        return {
            "corrected_ratio": round(corrected / prefetched, 4) if prefetched else 1.0,
            "selected_pages": round((late + hits) / num_steps, 1),
            "late_pages": round(late / num_steps, 1),
            "early_pages": round(early / num_steps, 1),
        }
