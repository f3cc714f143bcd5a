"""The tables of an evaluation, as text and nothing else: terminal, Markdown and HTML show them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = [
    "Cell",
    "Table",
    "describe",
    "make_short_tables",
    "make_tables",
    "number",
    "with_interval",
]

Line = dict[str, Any]


class Cell(NamedTuple):
    """Text, greyed where it ranks nothing."""

    text: str
    grey: bool = False


class Table(NamedTuple):
    """A title, what its columns mean, heads, and rows of as many cells."""

    title: str
    note: str
    heads: list[str]
    rows: list[list[Cell]]


_FIGURES = {
    "kl": "KL",
    "kl_ratio": "KL / oracle",
    "ppl": "ppl",
    "ppl_ratio": "ppl / dense",
    "copy_ppl": "copy ppl",
    "copy_ppl_ratio": "copy / dense",
}
_KEPT = {
    "mass": "mass",
    "oracle_recall": "recall",
    "kept_mean": "kept",
    "kept_p95": "kept p95",
    "capped": "capped",
    "adjacent_overlap": "overlap",
}


def make_tables(result: dict[str, Any]) -> list[Table]:
    """All tables of what ``hisparse eval --json`` prints."""
    tables = [_scores(result["cells"]), _divergence(result["summary"]), _kept(result["summary"])]
    return [*tables, _hits(result["summary"])]


def make_short_tables(result: dict[str, Any]) -> list[Table]:
    """The scores, and of all else what compares methods best: for a terminal."""
    kept = ("mass", "kept_mean", "bytes_per_token")
    heads = {"mass": "mass", "kept_mean": "kept", "bytes_per_token": "bytes"}
    short = _table(
        "Against dense attention",
        "KL: nats a token. / oracle: over the exact choice of pages. ppl, copy: perplexity over "
        "the dense model's. mass: attention kept. kept: tokens a step. bytes: device memory a "
        "token, beside K and V.",
        ["KL", "/ oracle", "ppl", "copy", *heads.values()],
        result["summary"],
        lambda line: [
            with_interval(line, "kl"),
            *(number(line[name]) for name in ("kl_ratio", "ppl_ratio", "copy_ppl_ratio", *kept)),
        ],
    )
    return [_scores(result["cells"]), short]


def describe(line: Line) -> str:
    """Method, budget and context of a line or cell, in words."""
    budget = "" if line["method"] == "dense" else f", {line['budget']}"
    return f"{line['method']}{budget} of {line['context']}"


def number(value: float | None) -> str:
    """Three digits that count, or all before the point; "-" for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def with_interval(line: Line, name: str) -> str:
    """A figure of a summary line and its 95% interval."""
    if line[name] is None:
        return "-"
    low, high = line["intervals"][name]
    return f"{number(line[name])} ({number(low)} to {number(high)})"


def _table(
    title: str,
    note: str,
    heads: Sequence[str],
    lines: Sequence[Line],
    row: Callable[[Line], Sequence[str]],
) -> Table:
    rows = [[Cell(text) for text in (describe(line), *row(line))] for line in lines]
    return Table(title, note, ["method, budget of context", *heads], rows)


def _scores(cells: Sequence[Line]) -> Table:
    tasks = sorted({cell["task"] for cell in cells})
    rows: dict[str, dict[str, Cell]] = {}
    counts: dict[str, set[int]] = {task: set() for task in tasks}
    for cell in cells:
        score, low, high = (f"{100 * cell[name]:.0f}" for name in ("score", "low", "high"))
        row = rows.setdefault(describe(cell), {})
        row[cell["task"]] = Cell(f"{score} ({low} to {high})", grey=not cell["usable"])
        counts[cell["task"]].add(cell["n"])
    sizes = {task: "-".join(str(n) for n in sorted({min(x), max(x)})) for task, x in counts.items()}
    heads = ["method, budget of context", *(f"{task} (n {sizes[task]})" for task in tasks)]
    absent = Cell("-")
    return Table(
        "Questions answered right, percent",
        "All tokens of the answer right, with 95% intervals of the bootstrap over questions. Where "
        "all are right, or all wrong, it has no width: up to 3 / n of all such questions may still "
        "be otherwise. Grey or in brackets: the dense model is below 90% itself; ranks nothing.",
        heads,
        [[Cell(name), *(row.get(task, absent) for task in tasks)] for name, row in rows.items()],
    )


def _divergence(lines: Sequence[Line]) -> Table:
    drawn = {
        line["resampled"]: f"{line['resampled']} ({line['documents']} documents)" for line in lines
    }
    return _table(
        "Divergence and perplexity",
        "KL: nats a token from the dense next-token distribution, over the text that follows, in "
        "pieces of 32 tokens. KL / oracle: over that of the exact choice of pages under the same "
        "scope, budget and context. ppl: of the text that follows; copy ppl: of passages that "
        "stood earlier; each also over the dense model's. Ratios are on the same documents, "
        "resampled in pairs. "
        f"Intervals: 95% of the bootstrap over {'; '.join(drawn.values())}.",
        list(_FIGURES.values()),
        lines,
        lambda line: [with_interval(line, name) for name in _FIGURES],
    )


def _kept(lines: Sequence[Line]) -> Table:
    def row(line: Line) -> list[str]:
        flat = [x for layer in line["kept_by_head"] or () if layer is not None for x in layer]
        extremes = f"{number(min(flat))} to {number(max(flat))}" if flat else "-"
        if flat and max(flat) - min(flat) < 1:
            extremes = "even"
        values = [number(line[name]) for name in _KEPT]
        return [line["selection_scope"] or "-", *values, extremes, number(line["bytes_per_token"])]

    return _table(
        "What is kept",
        "mass: attention kept. recall: of the best pages, as many as were chosen. kept: tokens "
        "attended a step and row, and their 95th percentile. capped: part of the selections that "
        "hold as many pages as they may. overlap: of adjacent steps. by head: kept, the least and "
        "the most of a layer's head; even: the same everywhere. bytes: device memory a token, "
        "beside K and V.",
        ["scope", *_KEPT.values(), "by head", "bytes"],
        lines,
        row,
    )


def _hits(lines: Sequence[Line]) -> Table:
    some = [line for line in lines if line["hit_ratio"]]
    sizes = list(some[0]["hit_ratio"]) if some else []
    return _table(
        "Hit ratio by buffer size",
        "Part of the selected pages that an LRU buffer of so many budgets holds already.",
        sizes,
        some,
        lambda line: [number(line["hit_ratio"][size]) for size in sizes],
    )
