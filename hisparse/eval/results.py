"""From records to tables: means, and how sure they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from hisparse.eval.bootstrap import FEWEST_DOCUMENTS, mean_interval
from hisparse.eval.divergence import Record, kl, kl_ratio, perplexities
from hisparse.eval.documents import CONTINUE, COPY
from hisparse.eval.method import DENSE

__all__ = ["USABLE", "make_cells", "make_summary"]

#: Tasks that the dense model does below this are shown, but rank nothing.
USABLE = 0.9
_MEANS = ("mass", "oracle_recall", "adjacent_overlap", "kept_mean", "kept_p95", "capped")


def make_cells(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One cell for each method, budget, context and task: the part of questions answered right.

    ``low`` and ``high`` are a 95% interval of the bootstrap over questions, ``dense`` the score of
    the dense model on the same questions, ``usable`` whether that is at least :data:`USABLE`.
    """
    cells = []
    dense = _dense(records)
    for (method, budget, context), group in _grouped(records, _key):
        tasks = sorted({x["task"] for r in group for x in r["items"]} - {CONTINUE})
        for task in tasks:
            right = _right(group, task)
            reference = float(_right([dense[r["document"]] for r in group], task).mean())
            low, high = mean_interval(right)
            cells.append(
                {
                    "method": method,
                    "algorithm": group[0]["algorithm"],
                    "budget": budget,
                    "context": context,
                    "task": task,
                    "score": float(right.mean()),
                    "low": low,
                    "high": high,
                    "dense": reference,
                    "usable": reference >= USABLE,
                    "n": len(right),
                    "kept_mean": _mean(group, "kept_mean"),
                    "kept_p95": _mean(group, "kept_p95"),
                }
            )
    return cells


def make_summary(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One line for each method, budget and context.

    ``kl`` is the mean divergence from the dense next-token distribution in nats, ``ppl`` the
    perplexity of the text that follows, ``copy_ppl`` of passages that stood earlier; ``kl_ratio``
    is ``kl`` over that of plain ``oracle`` of the same scope, budget and context, None where it did
    not run, ``ppl_ratio`` and ``copy_ppl_ratio`` are over the dense model's: both on the same
    documents. ``intervals`` has ``[low, high]`` of each of these, 95% of the bootstrap, ratios by
    pairs; ``resampled`` says what is drawn. ``mass`` is the attention kept, ``oracle_recall`` the
    part of the best pages, as many as were chosen, that were chosen; ``kept_by_head`` the tokens
    attended by layer and head of the selection, None for a layer without a selection of its own;
    ``hit_ratio`` that of LRU buffers by their size in budgets; ``bytes_per_token`` of device memory
    beside K and V.
    """
    lines = []
    dense = _dense(records)
    for (method, budget, context), group in _grouped(records, _key):
        figures = {
            "kl": kl(group),
            **perplexities("ppl", group, dense, CONTINUE),
            **perplexities("copy_ppl", group, dense, COPY),
            "kl_ratio": kl_ratio(group, records),
        }
        lines.append(
            {
                "method": method,
                "algorithm": group[0]["algorithm"],
                "budget": budget,
                "context": context,
                "selection_scope": group[0].get("selection_scope"),
                "documents": len(group),
                "resampled": _resampled(len(group)),
                **{name: figure[0] if figure else None for name, figure in figures.items()},
                "intervals": {
                    name: list(figure[1]) if figure else None for name, figure in figures.items()
                },
                **{name: _mean(group, name) for name in _MEANS},
                "kept_by_head": _kept_by_head(group),
                "hit_ratio": _hit_ratio(group),
                "bytes_per_token": group[0]["bytes_per_token"],
            }
        )
    return lines


def _key(record: Record) -> tuple[Any, ...]:
    return record["method"], record["budget"], record["context"]


def _dense(records: Iterable[Record]) -> dict[str, Record]:
    return {r["document"]: r for r in records if r["method"] == DENSE}


def _grouped(
    records: Iterable[Record], key: Callable[[Record], tuple[Any, ...]]
) -> list[tuple[tuple[Any, ...], list[Record]]]:
    """Records of the same key, in the order in which keys come."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return list(groups.items())


def _resampled(documents: int) -> str:
    return "documents" if documents >= FEWEST_DOCUMENTS else "tokens and passages"


def _right(records: Iterable[Record], task: str) -> np.ndarray:
    return np.array([x["right"] for r in records for x in r["items"] if x["task"] == task], float)


def _mean(records: Sequence[Record], name: str) -> float | None:
    """None for dense attention, which selects nothing."""
    values = [r[name] for r in records if name in r]
    return float(np.mean(values)) if values else None


def _kept_by_head(records: Sequence[Record]) -> list[list[float] | None] | None:
    found = [r["kept_by_head"] for r in records if "kept_by_head" in r]
    if not found:
        return None
    return [
        None if layers[0] is None else np.mean(layers, axis=0).tolist()
        for layers in zip(*found, strict=True)
    ]


def _hit_ratio(records: Sequence[Record]) -> dict[str, float] | None:
    found = [r["hit_ratio"] for r in records if "hit_ratio" in r]
    return {n: float(np.mean([x[n] for x in found])) for n in found[0]} if found else None
