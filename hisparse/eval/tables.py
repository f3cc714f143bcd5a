"""The tables of an evaluation as text, for the terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Line = dict[str, Any]


class Cell(NamedTuple):
    """The text of a cell; grey if it does not rank methods."""

    text: str
    grey: bool = False


class Table(NamedTuple):
    """A table; ``note`` explains its columns, and each row has a cell for each head."""

    title: str
    note: str
    heads: list[str]
    rows: list[list[Cell]]


#: Fields of a summary line that have intervals, and their heads.
FIGURES = {
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
    """All tables of an object that ``hisparse eval --json`` printed."""
    tables = [_scores(result["cells"]), _divergence(result["summary"]), _kept(result["summary"])]
    return [*tables, _hits(result["summary"])]


def make_short_tables(result: dict[str, Any]) -> list[Table]:
    """The scores and the most telling other figures, for a terminal."""
    kept = ("mass", "kept_mean", "bytes_per_token")
    heads = {"mass": "mass", "kept_mean": "kept", "bytes_per_token": "bytes"}
    short = _table(
        "Compared with dense attention",
        "KL: nats per token. / oracle: KL over that of the exact best pages. ppl, copy: perplexity "
        "over the dense model's. mass: fraction of exact attention kept. kept: tokens attended per "
        "step. bytes: device memory per token for representations.",
        ["KL", "/ oracle", "ppl", "copy", *heads.values()],
        result["summary"],
        lambda line: [
            with_interval(line, "kl"),
            *(number(line[name]) for name in ("kl_ratio", "ppl_ratio", "copy_ppl_ratio", *kept)),
        ],
    )
    return [_scores(result["cells"]), short]


def describe(line: Line) -> str:
    """Method, budget and context of a line or cell as a row head."""
    budget = "" if line["method"] == "dense" else f", {line['budget']}"
    return f"{line['method']}{budget} of {line['context']}"


def number(value: float | None) -> str:
    """Three significant digits, or all digits of a whole number above 1000; "-" for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def with_interval(line: Line, name: str) -> str:
    """A value of a summary line and its 95% interval."""
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
        "Correct answers, percent",
        "An answer is correct if all its tokens are the most likely ones. 95% bootstrap intervals "
        "over questions. The interval has no width if all answers are correct or all are wrong: up "
        "to 3 / n of all such questions may still differ. Grey or in brackets: the dense model "
        "scores below 90%, so the task does not rank methods.",
        heads,
        [[Cell(name), *(row.get(task, absent) for task in tasks)] for name, row in rows.items()],
    )


def _divergence(lines: Sequence[Line]) -> Table:
    drawn = {
        line["resampled"]: f"{line['resampled']} ({line['documents']} documents)" for line in lines
    }
    return _table(
        "Divergence and perplexity",
        "KL: divergence from the dense next-token distribution on the following text, in pieces of "
        "32 tokens, nats per token. KL / oracle: KL over that of the exact best pages with the "
        "same scope, budget and context. ppl: perplexity of the following text. copy ppl: "
        "perplexity of repeated passages. / dense: over the dense model's. Ratios compare the same "
        "documents and are resampled in pairs. "
        f"95% bootstrap intervals over {'; '.join(drawn.values())}.",
        list(FIGURES.values()),
        lines,
        lambda line: [with_interval(line, name) for name in FIGURES],
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
        "mass: fraction of exact attention kept. recall: fraction of the n best pages that are "
        "among the n selected pages. kept: tokens attended per step and row; p95: 95th percentile. "
        "capped: fraction of the selections with the largest allowed number of pages. overlap: "
        "fraction of the selected pages that the step before selected too. by head: smallest and "
        "largest mean of kept over heads of layers; even: all equal. bytes: device memory per "
        "token for representations.",
        ["scope", *_KEPT.values(), "by head", "bytes"],
        lines,
        row,
    )


def _hits(lines: Sequence[Line]) -> Table:
    some = [line for line in lines if line["hit_ratio"]]
    sizes = list(some[0]["hit_ratio"]) if some else []
    return _table(
        "Hit ratio by buffer size",
        "Fraction of the selected pages that are already in an LRU buffer of this many budgets.",
        sizes,
        some,
        lambda line: [number(line["hit_ratio"][size]) for size in sizes],
    )
