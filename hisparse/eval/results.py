"""From records to tables: means, and how sure they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from hisparse.eval.documents import CONTINUE, COPY
from hisparse.eval.method import DENSE

__all__ = ["USABLE", "make_cells", "make_summary"]

#: Tasks that the dense model does below this are shown, but rank nothing.
USABLE = 0.9
_RESAMPLES = 2000

Record = dict[str, Any]


def make_cells(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One cell for each method, budget, context and task: the part of questions answered right.

    ``low`` and ``high`` are a 95% interval of the bootstrap over questions, ``dense`` the score of
    the dense model on the same questions, ``usable`` whether that is at least :data:`USABLE`.
    """
    cells = []
    dense = {r["document"]: r for r in records if r["method"] == DENSE}
    for key, group in _grouped(records, lambda r: (r["method"], r["budget"], r["context"])):
        tasks = sorted({x["task"] for r in group for x in r["items"]} - {CONTINUE})
        for task in tasks:
            right = _right(group, task)
            reference = _right([dense[r["document"]] for r in group], task).mean()
            low, high = _interval(right)
            cells.append(
                {
                    "method": key[0],
                    "algorithm": group[0]["algorithm"],
                    "budget": key[1],
                    "context": key[2],
                    "task": task,
                    "score": float(right.mean()),
                    "low": low,
                    "high": high,
                    "dense": float(reference),
                    "usable": bool(reference >= USABLE),
                    "n": len(right),
                    "kept_mean": _mean(group, "kept_mean"),
                    "kept_p95": _mean(group, "kept_p95"),
                }
            )
    return cells


def make_summary(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One line for each method, budget and context.

    ``kl`` is the mean divergence from the dense next-token distribution in nats, with its standard
    error over documents; ``ppl`` the perplexity of the text that follows, ``copy_ppl`` of passages
    that stood earlier; ``mass`` the attention kept, ``oracle_recall`` the part of the best pages,
    as many as were chosen, that were chosen; ``bytes_per_token`` of device memory beside K and V.
    """
    lines = []
    for key, group in _grouped(records, lambda r: (r["method"], r["budget"], r["context"])):
        kl = np.array([r["kl"] for r in group])
        hits = [r["hit_ratio"] for r in group if "hit_ratio" in r]
        lines.append(
            {
                "method": key[0],
                "algorithm": group[0]["algorithm"],
                "budget": key[1],
                "context": key[2],
                "documents": len(group),
                "kl": float(kl.mean()),
                "kl_error": float(kl.std(ddof=1) / math.sqrt(len(kl))) if len(kl) > 1 else None,
                "ppl": _perplexity(group, CONTINUE),
                "copy_ppl": _perplexity(group, COPY),
                **{
                    name: _mean(group, name)
                    for name in (
                        "mass",
                        "oracle_recall",
                        "adjacent_overlap",
                        "kept_mean",
                        "kept_p95",
                        "capped",
                    )
                },
                "hit_ratio": {n: float(np.mean([h[n] for h in hits])) for n in hits[0]}
                if hits
                else None,
                "bytes_per_token": group[0]["bytes_per_token"],
            }
        )
    return lines


def _grouped(
    records: Iterable[Record], key: Callable[[Record], tuple[Any, ...]]
) -> list[tuple[tuple[Any, ...], list[Record]]]:
    """Records of the same key, in the order in which keys come."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return list(groups.items())


def _right(records: Iterable[Record], task: str) -> np.ndarray:
    return np.array([x["right"] for r in records for x in r["items"] if x["task"] == task], float)


def _mean(records: Sequence[Record], name: str) -> float | None:
    """None for dense attention, which selects nothing."""
    values = [r[name] for r in records if name in r]
    return float(np.mean(values)) if values else None


def _perplexity(records: Iterable[Record], task: str) -> float:
    items = [x for r in records for x in r["items"] if x["task"] == task]
    return math.exp(-sum(x["log_prob"] for x in items) / sum(x["tokens"] for x in items))


def _interval(values: np.ndarray) -> tuple[float, float]:
    """Bootstrap, 95%; the same each time."""
    rng = np.random.default_rng(0)
    means = rng.choice(values, (_RESAMPLES, len(values))).mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
