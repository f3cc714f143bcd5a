"""The plot of ``hisparse plan --plot``: requests and time per token against the context."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hisparse.errors import ConfigError
from hisparse.eval.svg_chart import Axis, Chart, Color

__all__ = ["contexts", "draw", "write"]

#: Okabe and Ito's palette for the colour-blind, for as many configurations.
_COLORS: tuple[Color, ...] = ("#009e73", "#d55e00", "#0072b2", "#cc79a7", "#56b4e9", "#e69f00")
_TOP, _BOTTOM = 78, 300
_LEFT_PANEL, _RIGHT_PANEL = (64, 380), (464, 780)
#: Halvings of the longest context, and the shortest context that is drawn.
_HALVINGS, _SHORTEST = 6, 256

#: Context to value, of one line of a panel.
_Line = Mapping[int, float]


def contexts(asked: Sequence[int]) -> list[int]:
    """The contexts that are drawn, ascending: the longest one, and its halves."""
    halves = (max(asked) >> times for times in range(_HALVINGS, -1, -1))
    return [context for context in halves if context >= _SHORTEST] or [max(asked)]


def write(path: str, rows: Sequence[dict[str, Any]], source: str) -> None:
    """Draw the rows of ``hisparse plan --json`` into a file.

    Args:
        path: the file, which is replaced.
        rows: one for each configuration and context of :func:`contexts`.
        source: what the figures are for, in words.

    Raises:
        ConfigError: the name does not end with .svg, or there is nothing to draw.
        OSError: the file cannot be written.
    """
    if not path.endswith(".svg"):
        raise ConfigError(f"--plot: got {path!r}, expected a name that ends with .svg")
    Path(path).write_text(draw(rows, source), encoding="utf-8")


def draw(rows: Sequence[dict[str, Any]], source: str) -> str:
    """The plot as SVG; see :func:`write`."""
    timed = [row for row in rows if row["estimates"]]
    methods = list(dict.fromkeys((row["algorithm"], row["budget"]) for row in timed))
    if len({row["context"] for row in timed}) < 2 or len(methods) > len(_COLORS):
        raise ConfigError(
            f"--plot: got {len(timed)} rows with figures and {len(methods)} configurations, "
            f"expected two contexts or more of {_SHORTEST} tokens and more, and at most "
            f"{len(_COLORS)} configurations"
        )
    lines = {
        method: [row for row in timed if (row["algorithm"], row["budget"]) == method]
        for method in methods
    }
    chart = Chart(width=820, height=420, title="Requests and time per token against the context")
    chart.text(24, 30, "Planned, not measured: against tokens of context", size=16, bold=True)
    first = timed[0]["estimates"][0]
    slo = timed[0]["loads"][0]["slo_ms"] if timed[0]["loads"] else None
    within = f"Requests within {slo:g} ms per token" if slo else "Requests that fit in memory"
    _panel(chart, _LEFT_PANEL, within, *_requests(lines))
    words = f"ms per token, {first['batch']} at once: attention"
    rest = timed[0]["loads"][0]["rest_ms"] if timed[0]["loads"] else 0.0
    _panel(chart, _RIGHT_PANEL, words + (" and rest" if rest else ""), *_times(lines, rest))
    chart.line([(24, 356), (46, 356)], dashed=True, width=1.5)
    chart.text(52, 360, "dense")
    for i, (algorithm, budget) in enumerate(methods):
        x, y = 112 + 232 * (i % 3), 360 + 20 * (i // 3)
        chart.dot(x, y - 4, _COLORS[i])
        chart.text(x + 9, y, f"{algorithm}, budget {budget:,}")
    # A context that is on the device as a whole has 100%.
    least = min(row["estimates"][0]["hit_ratio"] for row in timed)
    hits = f"{least:.0%} hits where not all is on the device"
    chart.text(24, 404, f"{source}, {first['gpu']}, {hits}", size=11)
    return chart.to_svg()


def _requests(lines: Mapping[Any, Sequence[dict[str, Any]]]) -> tuple[_Line, list[_Line]]:
    def at_once(row: dict[str, Any], side: str) -> float:
        return float((row["loads"][0] if row["loads"] else row)[side]["max_requests"])

    every: list[_Line] = [
        {row["context"]: at_once(row, "hisparse") for row in rows} for rows in lines.values()
    ]
    dense: _Line = {
        row["context"]: at_once(row, "dense") for rows in lines.values() for row in rows
    }
    return dense, every


def _times(
    lines: Mapping[Any, Sequence[dict[str, Any]]], rest_ms: float
) -> tuple[_Line, list[_Line]]:
    def token_ms(row: dict[str, Any], side: str) -> float:
        return rest_ms + float(row["estimates"][0][side]["ms_per_token"])

    every: list[_Line] = [
        {row["context"]: token_ms(row, "hisparse") for row in rows} for rows in lines.values()
    ]
    dense: _Line = {
        row["context"]: token_ms(row, "dense") for rows in lines.values() for row in rows
    }
    return dense, every


def _panel(
    chart: Chart, panel: tuple[int, int], title: str, dense: _Line, lines: Sequence[_Line]
) -> None:
    """A line for dense attention and one for each configuration, on two logarithmic axes."""
    tokens = sorted({context for line in (dense, *lines) for context in line})
    # No request is no place on a logarithmic axis: the line ends before.
    values = [value for line in (dense, *lines) for value in line.values() if value > 0] or [1.0]
    x = Axis(low=tokens[0], high=tokens[-1], start=panel[0], end=panel[1], log=True)
    low, high = min(values) / 1.2, max(values) * 1.2
    y = Axis(low=low, high=high, start=_BOTTOM, end=_TOP, log=True)
    chart.text(panel[0] - 40, 58, title, bold=True)
    chart.grid_y(y, _ticks(low, high), panel)
    chart.grid_x(x, [(value, _short(value)) for value in tokens], (_TOP, _BOTTOM))
    for line, color in ((dense, None), *zip(lines, _COLORS, strict=False)):
        points = [(x(at), y(value)) for at, value in sorted(line.items()) if value > 0]
        if color is None:
            chart.line(points, dashed=True, width=1.5)
            continue
        chart.line(points, color=color, width=1.5)
        for point in points:
            chart.dot(*point, color)


def _ticks(low: float, high: float) -> list[tuple[float, str]]:
    """1, 2 and 5 times powers of ten; powers alone on a long axis."""
    steps = (1, 2, 5) if high / low < 300 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [step * 10.0**power for power in powers for step in steps]
    return [(value, f"{value:,g}") for value in values if low <= value <= high]


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else f"{tokens:,}"
