"""All plots of an evaluation for the HTML report. Needs matplotlib."""

from __future__ import annotations

from typing import Any, NamedTuple

from matplotlib.figure import Figure

from hisparse.eval.budget_plots import MASS, QUALITY, against_budget, mean_scores
from hisparse.eval.method import DENSE
from hisparse.eval.plot_style import Style, drawing
from hisparse.eval.single_budget_plots import divergence, hit_ratio, kept_by_head

__all__ = ["Plot", "make_plots"]


class Plot(NamedTuple):
    """A figure with its title and caption."""

    title: str
    note: str
    figure: Figure


def make_plots(result: dict[str, Any], styles: dict[str, Style]) -> list[Plot]:
    """The plots for which the result has data.

    Args:
        result: object that ``hisparse eval --json`` printed.
        styles: style of each method, without dense attention.
    """
    summary = [x for x in result["summary"] if x["method"] != DENSE]
    with drawing():
        made = [
            (
                "Divergence by method",
                "KL from the dense next-token distribution, with 95% intervals. Lower is better.",
                divergence(summary, styles),
            ),
            (
                "Quality against budget",
                "Bars are 95% intervals. Lower is better, except for correct answers: their mean "
                "over the tasks on which the dense model reaches 90%. Dashed: dense attention.",
                against_budget(summary, mean_scores(result["cells"]), QUALITY, styles),
            ),
            (
                "Attention mass against budget",
                "Fraction of exact attention on the tokens kept. Dashed: all tokens.",
                against_budget(summary, [], MASS, styles),
            ),
            (
                "Hit ratio against buffer size",
                "Fraction of the selected pages that are already in an LRU buffer of this size.",
                hit_ratio(summary, styles),
            ),
            (
                "Tokens kept by layer and head",
                "Methods whose heads keep different numbers of tokens, with their budgets. Blank: "
                "a layer that is dense or reuses the selection of an earlier layer.",
                kept_by_head(summary),
            ),
        ]
    return [Plot(title, note, figure) for title, note, figure in made if figure is not None]
