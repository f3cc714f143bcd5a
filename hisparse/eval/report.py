"""An evaluation as a Markdown page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["COLUMNS", "describe", "to_markdown"]

#: Fields of a summary line, and their heads in tables.
COLUMNS = {
    "kl": "kl",
    "ppl": "ppl",
    "copy_ppl": "copy",
    "mass": "mass",
    "oracle_recall": "recall",
    "kept_mean": "kept",
    "kept_p95": "kept p95",
    "adjacent_overlap": "overlap",
}
_EXPLAINED = """\
Scores are percent of questions of which every token was right, with 95% intervals of the
bootstrap; in brackets where the dense model itself is below 90%: those rank nothing. kl: nats
from the dense next-token distribution, with its standard error over documents. ppl: of the text
that follows. copy: perplexity of passages that stood earlier. mass: attention kept. recall: of
the best pages, as many as were chosen. kept: tokens attended per step and row. overlap: of
adjacent steps. hits: of an LRU buffer of 1, 2 and 4 budgets. bytes: device memory per token
beside K and V."""


def describe(line: dict[str, Any]) -> str:
    """Method, budget and context of a line or cell, in words."""
    budget = "" if line["method"] == "dense" else f", {line['budget']}"
    return f"{line['method']}{budget} of {line['context']}"


def to_markdown(result: dict[str, Any]) -> str:
    """The page.

    Args:
        result: what ``hisparse eval --json`` prints.
    """
    return "\n".join(
        [
            f"# Quality: {result['model']}",
            "",
            f"Made by `{result['line']}` on {result['date']}, commit {result['commit']}, "
            f"{result['machine']}; " + ", ".join(f"{k} {v}" for k, v in result["versions"].items()),
            "",
            *_scores(result["cells"]),
            "",
            *_summary(result["summary"]),
            "",
            _EXPLAINED,
            "",
        ]
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [" | ".join(heads), "|".join("---" for _ in heads), *(" | ".join(row) for row in rows)]
    return [f"| {line} |" for line in lines]


def _scores(cells: Sequence[dict[str, Any]]) -> list[str]:
    tasks = sorted({cell["task"] for cell in cells})
    rows: dict[str, dict[str, str]] = {}
    for cell in cells:
        shown = f"{100 * cell['score']:.0f} ({100 * cell['low']:.0f}-{100 * cell['high']:.0f})"
        row = rows.setdefault(describe(cell), {})
        row[cell["task"]] = shown if cell["usable"] else f"[{shown}]"
    counts = {cell["task"]: cell["n"] for cell in cells}
    heads = ["method, budget of context", *(f"{task} (n {counts[task]})" for task in tasks)]
    return _table(heads, ([name, *(row[task] for task in tasks)] for name, row in rows.items()))


def _summary(lines: Sequence[dict[str, Any]]) -> list[str]:
    rows = []
    for line in lines:
        values = ["-" if line[name] is None else f"{line[name]:.3g}" for name in COLUMNS]
        if line["kl_error"] is not None:
            values[0] += f" \u00b1 {line['kl_error']:.1g}"
        hits = line["hit_ratio"]
        values.append("-" if hits is None else " ".join(f"{x:.2f}" for x in hits.values()))
        rows.append([describe(line), *values, f"{line['bytes_per_token']:,.0f}"])
    return _table(["method, budget of context", *COLUMNS.values(), "hits", "bytes"], rows)
