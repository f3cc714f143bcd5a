"""How plots look: the same colours for a method everywhere, light and dark."""

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

#: Arguments of ``Axes.plot``.
Style = dict[str, Any]

#: Okabe and Ito's, told apart by the colour-blind, those that show on white and on black.
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c")
_MARKERS = "osD^vPX*"
#: Stands for the colour of the page's text, which a theme changes.
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
    """A colour and a marker for each method, no two alike."""
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
    """A context in which figures are made."""
    return rc_context(_SETTINGS)


def make_axes(count: int, columns: int, height: float = 2.6) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` panels, at most ``columns`` side by side, inches high each."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(9.6 if columns > 1 else 5.6, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes[count:]:
        ax.remove()
    return figure, axes[:count]


def legend(figure: Figure, methods: Iterable[str], styles: dict[str, Style]) -> None:
    """Below the panels, each method once, in the order of ``styles``."""
    present = set(methods)
    names = [name for name in styles if name in present]
    handles = [Line2D([], [], **styles[name]) for name in names]
    columns = 2 if figure.get_figwidth() > 6 else 1
    labels = [wrap(name, 60) for name in names]
    # Room of its own, so that panels stay as high as they are.
    lines = sum(label.count("\n") + 1 for label in labels) / columns
    figure.set_figheight(figure.get_figheight() + 0.3 + 0.2 * lines)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def log_axis(axis: Axis) -> None:
    """Plain numbers at 1, 2 and 5 of each power of ten."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def spread(i: int, count: int) -> float:
    """A factor near 1, another one for each of ``count`` things."""
    return float(1.015 ** (i - (count - 1) / 2))


def wrap(name: str, width: int) -> str:
    """A method's name over several lines."""
    return textwrap.fill(name.replace(",", ", "), width)


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an ``svg`` element for a page of HTML.

    Args:
        figure: drawn by this module's functions.
        name: begins all of its ids, which are then its own.
    """
    file = io.StringIO()
    with drawing():
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
