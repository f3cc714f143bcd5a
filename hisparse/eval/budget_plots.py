"""Plots of quality and attention mass against the budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from hisparse.eval.method import DENSE
from hisparse.eval.plot_style import Style, legend, log_axis, make_axes, spread

__all__ = ["MASS", "QUALITY", "Measure", "against_budget", "mean_scores"]

Line = dict[str, Any]


class Measure(NamedTuple):
    """A field of summary lines as an axis; ``level`` is the value of dense attention."""

    name: str
    label: str
    level: float | None
    log: bool


QUALITY = (
    Measure("kl", "KL to dense, nats", None, log=True),
    Measure("ppl_ratio", "perplexity / dense", 1.0, log=False),
    Measure("copy_ppl_ratio", "copy perplexity / dense", 1.0, log=True),
)
MASS = (Measure("mass", "attention mass kept", 1.0, log=False),)


def mean_scores(cells: Sequence[Line]) -> list[Line]:
    """Mean over the usable tasks, percent, for each method, budget and context.

    ``score`` is the method's mean and ``dense`` that of the dense model.
    """
    found: dict[tuple[Any, ...], list[Line]] = {}
    for cell in cells:
        if cell["usable"] and cell["method"] != DENSE:
            found.setdefault((cell["method"], cell["budget"], cell["context"]), []).append(cell)
    return [
        group[0]
        | {name: 100 * sum(x[name] for x in group) / len(group) for name in ("score", "dense")}
        for group in found.values()
    ]


def against_budget(
    summary: Sequence[Line],
    scores: Sequence[Line],
    measures: Sequence[Measure],
    styles: dict[str, Style],
) -> Figure | None:
    """A panel for each measure and context; None if no context has two budgets."""
    contexts = [
        context
        for context in sorted({line["context"] for line in summary})
        if len({line["budget"] for line in summary if line["context"] == context}) > 1
    ]
    if not contexts:
        return None
    panels = []
    for context in contexts:
        lines = [line for line in summary if line["context"] == context]
        panels += [(context, measure, lines) for measure in measures]
        own = [line for line in scores if line["context"] == context]
        if own:
            score = Measure("score", "correct answers, percent", own[0]["dense"], log=False)
            panels.append((context, score, own))
    columns = len(contexts) if len(measures) == 1 else 2
    figure, axes = make_axes(len(panels), columns)
    first: dict[str, Axes] = {}
    for ax, (context, measure, lines) in zip(axes, panels, strict=True):
        if first.setdefault(measure.name, ax) is not ax:
            ax.sharey(first[measure.name])
        ax.set_title(f"{measure.label}, context {context:,}")
        _draw(ax, lines, measure, styles)
    legend(figure, [line["method"] for line in summary if line["context"] in contexts], styles)
    return figure


def _draw(ax: Axes, lines: Sequence[Line], measure: Measure, styles: dict[str, Style]) -> None:
    drawn = sorted((x for x in lines if x[measure.name] is not None), key=lambda x: x["budget"])
    methods = [m for m in styles if any(line["method"] == m for line in drawn)]
    for i, method in enumerate(methods):
        own = [line for line in drawn if line["method"] == method]
        # Shift the methods sideways, so that equal values do not hide each other.
        x = [line["budget"] * spread(i, len(methods)) for line in own]
        ax.plot(x, [line[measure.name] for line in own], **styles[method])
        for at, line in zip(x, own, strict=True):
            if measure.name in line.get("intervals", {}):
                low, high = line["intervals"][measure.name]
                ax.vlines(at, low, high, colors=styles[method]["color"], linewidth=1)
    budgets = sorted({line["budget"] for line in lines})
    ax.set_xscale("log", base=2)
    ax.set_xticks(budgets, [f"{budget:,}" for budget in budgets])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("budget, tokens")
    if measure.log:
        ax.set_yscale("log")
        log_axis(ax.yaxis)
    if measure.level is not None:
        ax.axhline(measure.level, color="gray", linestyle="--", linewidth=1)
