"""Tables of what ``hisparse eval`` measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hisparse.eval.method import DENSE
from hisparse.eval.results import MEAN

#: A line of a result's ``summary`` or ``cells``.
Line = dict[str, Any]

_LABEL = "method, budget of context"


class Table(NamedTuple):
    """A table; ``note`` explains its columns, and each row has a cell for each head.

    A cell in brackets does not rank methods.
    """

    title: str
    note: str
    heads: list[str]
    rows: list[list[str]]


def make_tables(result: dict[str, Any]) -> list[Table]:
    """The tables of an object that ``hisparse eval --json`` printed."""
    return [_scores(result["cells"]), _figures(result["summary"])]


def make_ruler_tables(cells: Sequence[Line]) -> list[Table]:
    """A table for each context of an object that ``hisparse eval --ruler --json`` printed."""
    return [
        _ruler(context, [cell for cell in cells if cell["context"] == context])
        for context in sorted({cell["context"] for cell in cells})
    ]


def _ruler(context: int, cells: Sequence[Line]) -> Table:
    methods = list(dict.fromkeys(_method(cell) for cell in cells))
    rows: dict[str, list[str]] = {}
    for cell in cells:
        tokens = "{0:,}-{2:,}".format(*cell["tokens"])
        row = rows.setdefault(f"{cell['task']} (n {cell['n']}, {tokens})", [])
        text = _percent(cell, "score", "low", "high")
        row.append(text if cell["usable"] else f"[{text}]")
    losses = [_percent(c, "lost", "lost_low", "lost_high") for c in cells if c["task"] == MEAN]
    if losses:
        rows["lost"] = losses
    return Table(
        f"RULER at {context:,} tokens, percent",
        "In brackets: prompts of the task, and the tokens of the shortest and the longest. RULER's "
        "metric: the part of the answers that the text contains. 95% bootstrap intervals over "
        "prompts; one has no width if all prompts score the same. Scores in brackets: the dense "
        "model scores below 50%, so the task does not rank methods. mean: over the prompts of the "
        "other tasks. lost: the dense mean less the method's, in pairs.",
        ["task", *methods],
        [[name, *row] for name, row in rows.items()],
    )


def _percent(line: Line, *names: str) -> str:
    """A value with its interval."""
    value, low, high = (f"{100 * line[name]:.0f}" for name in names)
    return f"{value} ({low}\N{EN DASH}{high})"


def _scores(cells: Sequence[Line]) -> Table:
    tasks = sorted({cell["task"] for cell in cells})
    rows: dict[str, dict[str, str]] = {}
    counts: dict[str, set[int]] = {task: set() for task in tasks}
    for cell in cells:
        text = _percent(cell, "score", "low", "high")
        row = rows.setdefault(_label(cell), {})
        row[cell["task"]] = text if cell["usable"] else f"[{text}]"
        counts[cell["task"]].add(cell["n"])
    sizes = {task: "-".join(str(n) for n in sorted({min(x), max(x)})) for task, x in counts.items()}
    return Table(
        "Correct answers, percent",
        "An answer is correct if all its tokens are the most likely ones. 95% bootstrap intervals "
        "over four documents or more, over questions if there are fewer. The interval has no width "
        "if all answers are correct or all are wrong: up to 3 / n of all such questions may still "
        "differ. In brackets: the dense model scores below 90%, so the task does not rank methods.",
        [_LABEL, *(f"{task} (n {sizes[task]})" for task in tasks)],
        [[name, *(row.get(task, "-") for task in tasks)] for name, row in rows.items()],
    )


def _figures(lines: Sequence[Line]) -> Table:
    names = ("ppl_ratio", "copy_ppl_ratio", "mass", "kept_mean", "bytes_per_token")
    rows = []
    for line in lines:
        low, high = map(_number, line["intervals"]["kl"])
        divergence = f"{_number(line['kl'])} ({low}\N{EN DASH}{high})"
        rows.append([_label(line), divergence, *(_number(line[name]) for name in names)])
    return Table(
        "Compared with dense attention",
        "KL: nats per token, with 95% bootstrap intervals. ppl, copy: perplexity over the dense "
        "model's. mass: fraction of exact attention kept. kept: tokens attended per step. bytes: "
        "device memory per token for representations.",
        [_LABEL, "KL", "ppl", "copy", "mass", "kept", "bytes"],
        rows,
    )


def _label(line: Line) -> str:
    """Method, budget and context of a line."""
    return f"{_method(line)} of {line['context']}"


def _method(line: Line) -> str:
    """Method and budget of a line."""
    budget = "" if line["method"] == DENSE else f", {line['budget']}"
    return f"{line['method']}{budget}"


def _number(value: float | None) -> str:
    """Three significant digits, or all digits of a whole number above 1000; "-" for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
