"""Draws throughput against concurrency and time per token against context."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from hisparse.eval.svg_chart import Axis, Chart
from hisparse_bench.load.report import LoadReport, LoadResult

__all__ = ["draw"]

_COLORS = ("#57606a", "#0969da", "#cf222e", "#1a7f37", "#8250df", "#bf8700", "#1b7c83", "#bc4c00")
_PANEL, _TOP, _LEFT = 380, 64, 56
_HEIGHT = 220

#: Points of a line, from left to right.
Points = list[tuple[float, float]]


def draw(report: LoadReport) -> str:
    """An SVG file; lines are contenders at one device memory and, on the left, one context.

    Memory in units of dense requests grows with the context: on the right such a line has units.
    """
    by_load: dict[str, Points] = defaultdict(list)
    by_context: dict[str, Points] = defaultdict(list)
    for case in report.cases:
        params = case.params
        for result in case.results:
            if case.gate == "failed" or not isinstance(result, LoadResult) or not result.throughput:
                continue
            size = params["device_memory"]
            memory = "" if size is None else f"{size / 2**20:,.0f} MiB"
            units = params["dense_requests"]
            follows = memory if units is None else f"{units} dense requests"
            line, by_units = (
                ", ".join(filter(None, (result.impl, params["model"], x)))
                for x in (memory, follows)
            )
            load = params.get("concurrency") or params.get("rate") or 0
            context = params["context"] or 0
            by_load[f"{line}, {context} tokens"].append((load, result.throughput))
            by_context[f"{by_units}, load {load:g}"].append((context, result.median_us / 1e3))
    names = [*by_load, *by_context]
    rows = max(len(by_load), len(by_context), 1)
    chart = Chart(
        width=2 * _PANEL + 40, height=_TOP + _HEIGHT + 72 + 16 * rows, title="Throughput and time"
    )
    chart.text(24, 30, report.title, bold=True)
    _draw_panel(chart, 0, "Output tokens per second, by concurrency or rate", by_load)
    _draw_panel(chart, _PANEL, "Median time per token in ms, by context", by_context)
    if not names:
        chart.text(24, _TOP + 40, "No figures: nothing was completed, or the check failed.")
    return chart.to_svg()


def _draw_panel(chart: Chart, left: float, title: str, lines: Mapping[str, Points]) -> None:
    chart.text(left + 24, _TOP - 10, title)
    points = [point for line in lines.values() for point in line]
    if not points:
        return
    x = Axis(low=0, high=_ceiling([p[0] for p in points]), start=left + _LEFT, end=left + _PANEL)
    y = Axis(low=0, high=_ceiling([p[1] for p in points]), start=_TOP + _HEIGHT, end=_TOP + 10)
    chart.grid_x(x, _ticks(x.high), (_TOP + 10, _TOP + _HEIGHT))
    chart.grid_y(y, _ticks(y.high), (left + _LEFT, left + _PANEL))
    for i, (name, line) in enumerate(lines.items()):
        color = _COLORS[i % len(_COLORS)]
        pixels = [(x(a), y(b)) for a, b in sorted(line)]
        chart.line(pixels, color=color, width=2)
        for pixel in pixels:
            chart.dot(*pixel, color)
        label = _TOP + _HEIGHT + 48 + 16 * i
        chart.dot(left + _LEFT, label - 4, color)
        chart.text(left + _LEFT + 10, label, name, size=11)


def _ceiling(values: Sequence[float]) -> float:
    return max(values) * 1.1 or 1.0


def _ticks(high: float) -> list[tuple[float, str]]:
    """Four to ten round numbers from 0."""
    power = 10.0 ** math.floor(math.log10(high / 4))
    # A power that rounding has made too large is a step of its own.
    step = next((x * power for x in (5, 2, 1) if 4 * x * power <= high), power)
    return [(i * step, f"{i * step:,.10g}") for i in range(int(high / step + 1e-9) + 1)]
