"""Plots of the HTML report, recorded traces and load tests. Needs matplotlib."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from hisparse.eval.method import DENSE
from hisparse.eval.results import number, pool_scores

#: A line of a result's ``summary`` or ``cells``; keyword arguments of ``Axes.plot``.
Line = dict[str, Any]
Style = dict[str, Any]

#: Okabe and Ito's colours for the colour-blind, those visible on white and on black.
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c")
_MARKERS = "osD^vPX*"
#: Placeholder for the colour of text, which depends on where the picture is shown.
_INK = "#010203"
_SETTINGS = {
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.markersize": 5,
    "svg.fonttype": "none",
    "svg.hashsalt": "hisparse",
    "text.parse_math": False,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    "text.color": _INK,
}
#: Fields of a result with a label, the value of dense attention and the axes that are logarithmic.
_MEASURES = (
    ("kl", "KL to dense, nats", None, "xy"),
    ("ppl_ratio", "perplexity / dense", 1.0, "x"),
    ("copy_ppl_ratio", "copy perplexity / dense", 1.0, "xy"),
    ("mass", "attention mass kept", 1.0, "x"),
    ("score", "correct answers, percent", None, "x"),
)


class Point(NamedTuple):
    """A figure ``y`` at ``x``, and the ends of its interval."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Lines over one pair of axes.

    Attributes:
        title: above the panel.
        lines: their points by name.
        label: of the horizontal axis.
        level: a dashed line, the value of dense attention.
        log: the axes that are logarithmic, "", "x", "y" or "xy".
        ticks: of the horizontal axis; empty: matplotlib chooses.
        unit: if given, each line is a row of ``y``, drawn from left to right and in figures.
    """

    title: str
    lines: Mapping[str, Sequence[Point]]
    label: str = ""
    level: float | None = None
    log: str = ""
    ticks: Sequence[float] = ()
    unit: str | None = None


def make_styles(names: Iterable[str]) -> dict[str, Style]:
    """A different combination of colour and marker for each line."""
    return {
        name: {
            "color": _COLORS[i % len(_COLORS)],
            "label": name,
            "marker": _MARKERS[i % len(_MARKERS)],
        }
        for i, name in enumerate(dict.fromkeys(names))
    }


def report_plots(
    result: dict[str, Any], styles: Mapping[str, Style]
) -> list[tuple[str, str, Figure]]:
    """Title, caption and figure of the HTML report's plots for which the result has data.

    Args:
        result: object that ``hisparse eval --json`` printed.
        styles: style of each method, without dense attention.
    """
    summary = [x for x in result["summary"] if x["method"] != DENSE]
    divergence = []
    for context, budget in sorted({(x["context"], x["budget"]) for x in summary}):
        title = f"KL to dense, nats; budget {budget:,}, context {context:,}"
        own = [x for x in summary if (x["context"], x["budget"]) == (context, budget)]
        panel = Panel(title=title, lines=figures(own, "kl", "budget"), log="x", unit="")
        divergence.append(panel)
    kl_note = "KL from the dense next-token distribution, with 95% intervals. Lower is better."
    budget_note = (
        "Bars are 95% intervals. Lower is better, except for attention mass and correct answers, "
        "of all tasks on which the dense model reaches 90%. Dashed: dense attention."
    )
    by_budget = _against_budget(summary + pool_scores(result["cells"])) if summary else []
    plots = (
        ("Divergence by method", kl_note, divergence),
        ("Quality against budget", budget_note, by_budget),
    )
    return [(title, note, draw(panels, styles)) for title, note, panels in plots if panels]


def trace_figure(traces: Sequence[Line]) -> Figure:
    """Hit ratio and bytes against the size of the buffer.

    Args:
        traces: what ``hisparse trace replay --json`` prints of each trace.
    """
    styles = make_styles(map(str, range(len(traces))))
    for style, about in zip(styles.values(), traces, strict=True):
        budget = about["settings"].get("budget", "?")
        label = f"{about['algorithm']}, budget {budget}, context {about['context'][0]:,}: "
        style["label"] = (label + about["note"])[:120]
    panels = []
    for title, name, scale in (
        ("Selected pages in a buffer of this size, percent", "hit_ratio", 100),
        ("Read from the host for a step of a request, MiB", "bytes_per_step", 2**-20),
    ):
        lines = {
            key: [Point(p["buffer"], *[scale * p[name]] * 3) for p in about["curve"]]
            for key, about in zip(styles, traces, strict=True)
        }
        sizes = [point.x for points in lines.values() for point in points]
        ticks = [2**i for i in range(32) if min(sizes) <= 2**i <= max(sizes)]
        panels.append(Panel(title=title, label="tokens", lines=lines, log="x", ticks=ticks))
    return draw(panels, styles, title="What LRU buffers would have held")


def load_figure(
    throughput: Mapping[str, Sequence[Point]], token_ms: Mapping[str, Sequence[Point]], title: str
) -> Figure:
    """Output tokens per second against the load, and ms per token against the context."""
    panels = [
        Panel(title="Output tokens per second", lines=throughput, label="concurrency or rate"),
        Panel(title="Median time per token, ms", lines=token_ms, label="tokens of context"),
    ]
    note = "" if throughput else "No figures: nothing was completed, or the check failed."
    return draw(panels, make_styles([*throughput, *token_ms]), title=title, note=note)


def to_svg(figure: Figure, name: str = "") -> str:
    """The figure as SVG.

    Args:
        figure: drawn by this module.
        name: "": a file with a background of its own. Otherwise an element for an HTML page in the
            colours of its theme, and the prefix of all ids, so that they are unique on the page.
    """
    file, nothing = io.StringIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context(_SETTINGS):
        color = "none" if name else "#ffffff"
        figure.savefig(file, format="svg", metadata=nothing, facecolor=color)
    svg = file.getvalue()[file.getvalue().index("<svg") :]
    if not name:
        return svg.replace(_INK, "#1f2328")
    svg = re.sub(r'\bid="', f'id="{name}-', svg.replace(_INK, "currentColor"))
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)


def figures(lines: Sequence[Line], name: str, x: str) -> dict[str, list[Point]]:
    """A field of summary lines, with its interval if it has one."""
    found: dict[str, list[Point]] = {}
    for line in lines:
        if (value := line.get(name)) is not None:
            low, high = line["intervals"].get(name, (value, value))
            point = Point(line[x] or line["context"], value, low, high)
            found.setdefault(line["method"], []).append(point)
    return found


def _against_budget(lines: Sequence[Line]) -> list[Panel]:
    """A panel for each measure and context with several budgets."""
    panels = []
    for context in sorted({line["context"] for line in lines}):
        own = [x for x in lines if x["context"] == context and x["method"] != DENSE]
        budgets = sorted({line["budget"] for line in own})
        for name, label, level, log in _MEASURES if len(budgets) > 1 else ():
            if points := figures(own, name, "budget"):
                title, x = f"{label}, context {context:,}", "budget, tokens"
                panels.append(
                    Panel(title=title, lines=points, label=x, level=level, log=log, ticks=budgets)
                )
    return panels


def draw(
    panels: Sequence[Panel], styles: Mapping[str, Style], *, title: str = "", note: str = ""
) -> Figure:
    """Draw panels, and below them a legend, each line once, in the order of ``styles``."""
    in_rows = panels[0].unit is not None
    columns = 1 if title and in_rows else min(2, len(panels))
    rows = -(-len(panels) // columns)
    present = {name for panel in panels for name in panel.lines}
    legend = [style for name, style in styles.items() if name in present]
    labels = [textwrap.fill(re.sub(",(?=[a-z])", ", ", style["label"]), 60) for style in legend]
    height = rows * (0.7 + 0.25 * len(legend) if in_rows else 2.6) + 0.5 * bool(title)
    height += 0.3 + 0.2 * sum(label.count("\n") + 1 for label in labels) / 2
    with rc_context(_SETTINGS):
        figure = Figure(figsize=(9.6, height), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False, sharex=in_rows).flat)
        for ax in axes[len(panels) :]:
            ax.remove()
        for ax, panel in zip(axes, panels, strict=False):
            _draw_panel(ax, panel, {x: style for x, style in styles.items() if x in panel.lines})
        figure.suptitle("\n".join([title, *textwrap.wrap(note, 120)]).strip())
        handles = [Line2D([], [], **style) for style in legend]
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def _draw_panel(ax: Axes, panel: Panel, styles: Mapping[str, Style]) -> None:
    for i, (name, style) in enumerate(styles.items()):
        points, color = sorted(panel.lines[name]), style["color"]
        x, y, low, high = zip(*points, strict=True)
        if panel.unit is not None:
            ax.plot(y, [-i] * len(y), **style)
            ax.hlines([-i] * len(y), low, high, colors=color)
            words, side = f"{number(y[0])}{panel.unit}", ax.get_yaxis_transform()
            ax.text(1.01, -i, words, transform=side, verticalalignment="center")
            continue
        if low != high:
            # Shift the lines sideways, so that equal values do not hide each other.
            x = tuple(value * 1.015 ** (i - (len(styles) - 1) / 2) for value in x)
            ax.vlines(x, low, high, colors=color, linewidth=1)
        ax.plot(x, y, **style)
    for name, axis in (("x", ax.xaxis), ("y", ax.yaxis)):
        if name in panel.log:
            getattr(ax, f"set_{name}scale")("log")
            # Plain numbers at 1, 2 and 5 times each power of ten.
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_locator(NullLocator())
    if panel.ticks:
        ax.set_xticks(panel.ticks, [f"{tick:,g}" for tick in panel.ticks])
    if panel.unit is not None:
        ax.set_ylim(-len(styles) + 0.4, 0.6)
        ax.set_yticks([])
        ax.tick_params(labelbottom=True)
    if panel.level is not None:
        ax.axhline(panel.level, color="gray", linestyle="--", linewidth=1)
    ax.set_title(panel.title)
    ax.set_xlabel(panel.label)
