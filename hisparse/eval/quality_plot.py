"""The README's plot of quality against budget.

``python -m hisparse.eval.quality_plot RESULT.json OUT.svg`` draws the output of ``hisparse eval
--json``. ``make docs`` runs it on a committed result.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hisparse.errors import ConfigError, HiSparseError, one_line
from hisparse.eval.method import DENSE
from hisparse.eval.report import read_result
from hisparse.eval.svg_chart import Axis, Chart, Color

__all__ = ["Point", "accuracies", "divergences", "draw", "main"]

#: Method to its colour (Okabe and Ito's palette for the colour-blind) and its legend.
_METHODS: dict[str, tuple[Color, str]] = {
    "oracle": ("#0072b2", "oracle: exact best pages"),
    "sketch": ("#009e73", "sketch"),
    "quest": ("#d55e00", "quest"),
    "streaming": ("#8c8c8c", "streaming: sinks and recent"),
    "dipr": ("#cc79a7", "dipr"),
    "dipr(alpha=0.003,device_buffer_size=512,index=flat,page_size=1,selection_scope=query_head)": (
        "#56b4e9",
        "dipr, per query head, pages of 1 token",
    ),
}
_TOP, _BOTTOM = 78, 300
#: Left and right pixels of the two panels.
_LEFT_PANEL, _RIGHT_PANEL = (60, 370), (450, 760)
#: Pixels of each legend's dot and baseline.
_LEGEND = ((112, 358), (300, 358), (380, 358), (460, 358), (112, 380), (180, 380))
#: Labels of the horizontal axes, tokens.
_TICKS = (128, 256, 512)
_Z95 = 1.96


class Point(NamedTuple):
    """A figure of one method under one budget, and its 95% interval.

    Attributes:
        attended: tokens attended per step and row, mean: methods that select a varying number of
            pages attend more or fewer than their budget.
        value, low, high: the figure and the ends of its interval.
    """

    attended: float
    value: float
    low: float
    high: float


def accuracies(result: dict[str, Any]) -> dict[str, list[Point]]:
    """Percent of questions answered correctly, over all tasks on which the dense model reaches 90%.

    Intervals are Wilson score intervals over questions.
    """
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for cell in result["cells"]:
        if cell["usable"]:
            groups.setdefault((cell["method"], cell["budget"]), []).append(cell)
    found: dict[str, list[Point]] = {}
    for (method, _), cells in groups.items():
        correct = sum(cell["score"] * cell["n"] for cell in cells)
        asked = sum(cell["n"] for cell in cells)
        percent = (100 * x for x in (correct / asked, *_wilson(correct, asked)))
        attended = cells[0]["kept_mean"] or result["context"][0]
        found.setdefault(method, []).append(Point(attended, *percent))
    return found


def divergences(result: dict[str, Any]) -> dict[str, list[Point]]:
    """KL divergence from the dense next-token distribution, nats a token."""
    found: dict[str, list[Point]] = {}
    for line in result["summary"]:
        attended = line["kept_mean"] or result["context"][0]
        point = Point(attended, line["kl"], *line["intervals"]["kl"])
        found.setdefault(line["method"], []).append(point)
    return found


def draw(result: dict[str, Any]) -> str:
    """The plot as SVG: accuracy on the left, divergence on the right.

    Args:
        result: object that ``hisparse eval --json`` printed.

    Raises:
        ConfigError: the result has several contexts.
    """
    if len(result["context"]) != 1:
        raise ConfigError(f"got contexts {result['context']}, expected a result with one context")
    context = result["context"][0]
    chart = Chart(width=800, height=420, title="Quality of sparse attention against its budget")
    title = f"Quality against tokens attended per step, of {context:,} tokens of context"
    chart.text(24, 30, title, size=16, bold=True)
    asked = sum(c["n"] for c in result["cells"] if c["usable"] and c["method"] == DENSE)
    scores = accuracies(result)
    x = _attended_axis(_LEFT_PANEL)
    y = Axis(low=0, high=100, start=_BOTTOM, end=_TOP)
    chart.text(24, 58, f"Questions answered correctly, percent of {asked}", bold=True)
    _draw_panel(chart, x, y, [(v, str(v)) for v in range(0, 101, 20)], scores)
    dense = y(scores[DENSE][0].value)
    chart.line([(_LEFT_PANEL[0], dense), (_LEFT_PANEL[1], dense)], dashed=True, width=1.5)
    x = _attended_axis(_RIGHT_PANEL)
    y = Axis(low=0.01, high=1, start=_BOTTOM, end=_TOP, log=True)
    chart.text(414, 58, "KL divergence from dense attention, nats per token", bold=True)
    ticks = [(v, str(v)) for v in (0.01, 0.03, 0.1, 0.3, 1.0)]
    _draw_panel(chart, x, y, ticks, divergences(result))
    _draw_legend(chart)
    source = f"{result['model']}, {result['machine']}, commit {result['commit'][:7]}"
    chart.text(24, 404, f"{source}. Bars are 95% intervals.", size=11)
    return chart.to_svg()


def _wilson(correct: float, asked: int) -> tuple[float, float]:
    """The 95% interval of a proportion."""
    share, z2 = correct / asked, _Z95**2
    centre = share + z2 / (2 * asked)
    half = _Z95 * math.sqrt(share * (1 - share) / asked + z2 / (4 * asked**2))
    return (centre - half) / (1 + z2 / asked), (centre + half) / (1 + z2 / asked)


def _attended_axis(panel: tuple[int, int]) -> Axis:
    return Axis(
        low=_TICKS[0] / 1.25, high=_TICKS[-1] * 1.25, start=panel[0], end=panel[1], log=True
    )


def _draw_panel(
    chart: Chart,
    x: Axis,
    y: Axis,
    ticks: Sequence[tuple[float, str]],
    points: dict[str, list[Point]],
) -> None:
    chart.grid_y(y, ticks, (x.start, x.end))
    chart.grid_x(x, [(tokens, str(tokens)) for tokens in _TICKS], (_TOP, _BOTTOM))
    label = "tokens attended per step, mean"
    chart.text((x.start + x.end) / 2, _BOTTOM + 34, label, size=11, anchor="middle")
    for i, (method, (color, _)) in enumerate(_METHODS.items()):
        # Shift the methods sideways, so that equal values do not hide each other.
        shift = 4 * (i - (len(_METHODS) - 1) / 2)
        own = sorted(points.get(method, ()))
        if len(own) > 1:
            chart.line([(x(p.attended) + shift, y(p.value)) for p in own], color=color, width=1.5)
        for p in own:
            at = x(p.attended) + shift
            chart.line([(at, y(p.low)), (at, y(p.high))], color=color)
            chart.dot(at, y(p.value), color)


def _draw_legend(chart: Chart) -> None:
    chart.line([(24, 354), (46, 354)], dashed=True, width=1.5)
    chart.text(52, 358, "dense")
    for i, (color, label) in enumerate(_METHODS.values()):
        x, y = _LEGEND[i]
        chart.dot(x, y - 4, color)
        chart.text(x + 9, y, label)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the result of the first file into the second; return the exit code."""
    names = sys.argv[1:] if arguments is None else arguments
    if len(names) != 2:
        print("usage: python -m hisparse.eval.quality_plot RESULT.json OUT.svg", file=sys.stderr)
        return 2
    try:
        svg = draw(read_result(Path(names[0])))
    except HiSparseError as error:
        print(f"hisparse: error: {error}", file=sys.stderr)
        return 1
    except (ArithmeticError, LookupError, ValueError) as error:
        # Such as a result without dense attention, or without questions.
        print(f"hisparse: error: nothing to draw: {one_line(error)}", file=sys.stderr)
        return 1
    Path(names[1]).write_text(svg, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
