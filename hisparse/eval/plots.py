"""The plots of an evaluation. Needs matplotlib; each is drawn only where there are data for it."""

from __future__ import annotations

from typing import Any, NamedTuple

from matplotlib.figure import Figure

from hisparse.eval.budget_plots import MASS, QUALITY, against_budget, mean_scores
from hisparse.eval.method import DENSE
from hisparse.eval.plot_style import Style, drawing
from hisparse.eval.single_budget_plots import divergence, hit_ratio, kept_by_head

__all__ = ["Plot", "make_plots"]


class Plot(NamedTuple):
    """A figure, and what it shows."""

    title: str
    note: str
    figure: Figure


def make_plots(result: dict[str, Any], styles: dict[str, Style]) -> list[Plot]:
    """All plots that there are data for.

    Args:
        result: what ``hisparse eval --json`` prints.
        styles: by method, dense left out.
    """
    summary = [x for x in result["summary"] if x["method"] != DENSE]
    with drawing():
        made = [
            (
                "Divergence by method",
                "KL from the dense next-token distribution, with 95% intervals; lower is better.",
                divergence(summary, styles),
            ),
            (
                "Quality against budget",
                "Bars are 95% intervals; lower is better, but for questions: the mean over tasks "
                "that the dense model does. Dashed: dense attention.",
                against_budget(summary, mean_scores(result["cells"]), QUALITY, styles),
            ),
            (
                "Attention mass against budget",
                "The part of exact attention that falls on what is kept. Dashed: all of it.",
                against_budget(summary, [], MASS, styles),
            ),
            (
                "Hit ratio against buffer size",
                "Part of the selected pages that an LRU buffer of so many budgets holds already.",
                hit_ratio(summary, styles),
            ),
            (
                "Tokens kept by layer and head",
                "Of the methods that keep more in one place than in another, with their budget. "
                "Blank: a layer that is dense or uses the selection of a layer before it.",
                kept_by_head(summary),
            ),
        ]
    return [Plot(title, note, figure) for title, note, figure in made if figure is not None]
