"""Aggregate records: the cells and the summary that ``hisparse eval --json`` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from hisparse.eval.bootstrap import MIN_DOCUMENTS, mean_interval, wilson_interval
from hisparse.eval.divergence import Record, kl, kl_ratio, perplexities
from hisparse.eval.documents import CONTINUE, COPY
from hisparse.eval.method import DENSE, identity

#: Tasks on which the dense model scores lower are shown in grey and do not rank methods.
USABLE = 0.9
_MEANS = ("mass", "oracle_recall", "adjacent_overlap", "kept_mean", "kept_p95", "capped")


def make_cells(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A cell for each method, budget, context and task: the fraction of correct answers.

    ``low`` and ``high`` are a 95% bootstrap interval over questions. ``dense`` is the score of the
    dense model on the same questions, and ``usable`` says whether it is at least :data:`USABLE`.
    """
    cells = []
    dense = _dense(records)
    for (method, budget, context), group in _grouped(records, _key):
        tasks = sorted({x["task"] for r in group for x in r["items"]} - {CONTINUE})
        for task in tasks:
            correct = _correct(group, task)
            reference = float(_correct([dense[r["document"]] for r in group], task).mean())
            low, high = mean_interval(correct)
            cells.append(
                {
                    **identity(method, group[0]["algorithm"], budget),
                    "context": context,
                    "task": task,
                    "score": float(correct.mean()),
                    "low": low,
                    "high": high,
                    "dense": reference,
                    "usable": reference >= USABLE,
                    "n": len(correct),
                    "kept_mean": _mean(group, "kept_mean"),
                    "kept_p95": _mean(group, "kept_p95"),
                }
            )
    return cells


def pool_scores(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each method, budget and context: percent of the answers that are correct.

    Over all tasks on which the dense model reaches :data:`USABLE`. ``n`` counts questions, and
    ``intervals`` has a 95% Wilson score interval over them.
    """
    found = []
    for _, group in _grouped([x for x in cells if x["usable"]], _key):
        correct, asked = sum(x["score"] * x["n"] for x in group), sum(x["n"] for x in group)
        low, high = (100 * end for end in wilson_interval(correct, asked))
        line = {"n": asked, "score": 100 * correct / asked, "intervals": {"score": (low, high)}}
        found.append(group[0] | line)
    return found


def make_summary(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A line for each method, budget and context.

    - ``kl``: mean KL divergence from the dense next-token distribution, nats per token;
    - ``ppl``, ``copy_ppl``: perplexity of the following text and of repeated passages;
    - ``kl_ratio``: ``kl`` over that of plain ``oracle`` with the same scope, budget and context, on
      the same documents; None if it did not run;
    - ``ppl_ratio``, ``copy_ppl_ratio``: over the dense model's, on the same documents;
    - ``intervals``: ``[low, high]`` of each of these, 95% bootstrap, ratios resampled in pairs;
    - ``resampled``: the unit of resampling;
    - ``mass``: fraction of exact attention on the tokens kept;
    - ``oracle_recall``: fraction of the n best pages that are among the n selected pages;
    - ``adjacent_overlap``: fraction of the selected pages that the step before selected too;
    - ``kept_mean``, ``kept_p95``: tokens attended per step and row;
    - ``capped``: fraction of the selections that have the largest allowed number of pages;
    - ``kept_by_head``: tokens attended by layer and head of the selection, None for a layer without
      a selection of its own;
    - ``hit_ratio``: hit ratio of LRU buffers by their size in budgets;
    - ``bytes_per_token``: device memory for representations.
    """
    lines = []
    dense = _dense(records)
    for (method, budget, context), group in _grouped(records, _key):
        estimates = {
            "kl": kl(group),
            **perplexities("ppl", group, dense, CONTINUE),
            **perplexities("copy_ppl", group, dense, COPY),
            "kl_ratio": kl_ratio(group, records),
        }
        lines.append(
            {
                **identity(method, group[0]["algorithm"], budget),
                "context": context,
                "selection_scope": group[0].get("selection_scope"),
                "documents": len(group),
                "resampled": _resampled(len(group)),
                **{name: x[0] if x else None for name, x in estimates.items()},
                "intervals": {name: list(x[1]) if x else None for name, x in estimates.items()},
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
    """Records grouped by key, in the order of each key's first record."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return list(groups.items())


def _resampled(documents: int) -> str:
    return "documents" if documents >= MIN_DOCUMENTS else "tokens and passages"


def _correct(records: Iterable[Record], task: str) -> np.ndarray:
    return np.array([x["right"] for r in records for x in r["items"] if x["task"] == task], float)


def _mean(records: Sequence[Record], name: str) -> float | None:
    """Mean over the records; None for dense attention, which selects nothing."""
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
