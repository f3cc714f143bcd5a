"""Style of the HTML report's plots: a colour for each method, and light and dark themes."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterable
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

__all__ = [
    "Style",
    "drawing",
    "legend",
    "log_axis",
    "make_axes",
    "make_styles",
    "spread",
    "to_svg",
    "wrap",
]

#: Keyword arguments of ``Axes.plot``.
Style = dict[str, Any]

#: Okabe and Ito's colours for the colour-blind, those visible on white and on black.
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c")
_MARKERS = "osD^vPX*"
#: Placeholder for the colour of the page's text, which depends on the theme.
_INK = "#010203"
_SETTINGS = {
    "axes.edgecolor": _INK,
    "axes.grid": True,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "hisparse",
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def make_styles(methods: Iterable[str]) -> dict[str, Style]:
    """A different combination of colour and marker for each method."""
    return {
        method: {
            "color": _COLORS[i % len(_COLORS)],
            "marker": _MARKERS[(i + i // len(_COLORS)) % len(_MARKERS)],
            "linewidth": 1.5,
            "markersize": 5,
        }
        for i, method in enumerate(dict.fromkeys(methods))
    }


def drawing() -> Any:
    """A context manager with this style, to draw figures in."""
    return rc_context(_SETTINGS)


def make_axes(count: int, columns: int, height: float = 2.6) -> tuple[Figure, list[Axes]]:
    """A figure of ``count`` panels, at most ``columns`` in a row, each ``height`` inches high."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(9.6 if columns > 1 else 5.6, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes[count:]:
        ax.remove()
    return figure, axes[:count]


def legend(figure: Figure, methods: Iterable[str], styles: dict[str, Style]) -> None:
    """Add a legend below the panels, each method once, in the order of ``styles``."""
    present = set(methods)
    names = [name for name in styles if name in present]
    handles = [Line2D([], [], **styles[name]) for name in names]
    columns = 2 if figure.get_figwidth() > 6 else 1
    labels = [wrap(name, 60) for name in names]
    # Make the figure taller, so that the panels keep their height.
    lines = sum(label.count("\n") + 1 for label in labels) / columns
    figure.set_figheight(figure.get_figheight() + 0.3 + 0.2 * lines)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def log_axis(axis: Axis) -> None:
    """Label an axis with plain numbers at 1, 2 and 5 times each power of ten."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def spread(i: int, count: int) -> float:
    """A factor near 1, different for each ``i`` of ``count``."""
    return float(1.015 ** (i - (count - 1) / 2))


def wrap(name: str, width: int) -> str:
    """Break a method's name into lines."""
    return textwrap.fill(name.replace(",", ", "), width)


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an ``svg`` element for HTML.

    Args:
        figure: drawn in the context of :func:`drawing`.
        name: prefix of all ids, so that they are unique on the page.
    """
    file = io.StringIO()
    with drawing():
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
