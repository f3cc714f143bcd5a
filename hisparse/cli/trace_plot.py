"""The plot of ``hisparse trace replay``: hit ratio and bytes against the size of the buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hisparse.eval.svg_chart import Axis, Chart, Color
from hisparse.trace import HitCurve
from hisparse.units import format_bytes

__all__ = ["draw"]

#: Okabe and Ito's colours for the colour-blind.
_COLORS: tuple[Color, ...] = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_FAINT: Color = "#c9ced4"
_TOP, _BOTTOM = 78, 300
_LEFT_PANEL, _RIGHT_PANEL = (60, 370), (480, 790)
_POINTS = 60


def draw(traces: Sequence[tuple[dict[str, Any], HitCurve]]) -> str:
    """The plot as SVG; the layers of a trace are drawn if it is the only one.

    Args:
        traces: what each trace holds, as ``hisparse trace replay --json`` prints it, and its curve.
    """
    low = min(curve.least_tokens for _, curve in traces)
    high = max((curve.hits.shape[-1] - 1) * curve.page_size for _, curve in traces)
    high = max(high, 2 * low)
    chart = Chart(
        width=830,
        height=356 + 20 * len(traces),
        title="Hit ratio and bytes read against the size of the device buffer",
    )
    chart.text(24, 30, "What LRU buffers would have held", size=16, bold=True)
    ticks = _powers(low, high)
    x = Axis(low=low, high=high, start=_LEFT_PANEL[0], end=_LEFT_PANEL[1], log=True)
    y = Axis(low=0, high=100, start=_BOTTOM, end=_TOP)
    chart.text(24, 58, "Selected pages that are in the buffer, percent", bold=True)
    _grid(chart, x, y, ticks, [(v, str(v)) for v in range(0, 101, 20)])
    if len(traces) == 1:
        curve = traces[0][1]
        sizes = _sizes(curve)
        by_layer = [curve.layer_hit_ratios(tokens) for tokens in sizes]
        for layer in zip(*by_layer, strict=True):
            pairs = zip(sizes, layer, strict=True)
            chart.line([(x(t), y(100 * r)) for t, r in pairs], color=_FAINT)
    for (_, curve), color in zip(traces, _colors(), strict=False):
        chart.line(
            [(x(t), y(100 * curve.hit_ratio(t))) for t in _sizes(curve)], color=color, width=2
        )
    most = max(curve.bytes_per_step(curve.least_tokens) for _, curve in traces)
    x = Axis(low=low, high=high, start=_RIGHT_PANEL[0], end=_RIGHT_PANEL[1], log=True)
    y = Axis(low=0, high=max(1.0, 1.05 * most), start=_BOTTOM, end=_TOP)
    chart.text(420, 58, "Bytes from host memory for a decode step of a request", bold=True)
    _grid(chart, x, y, ticks, [(most * i / 4, format_bytes(round(most * i / 4))) for i in range(5)])
    for (_, curve), color in zip(traces, _colors(), strict=False):
        points = [(x(t), y(curve.bytes_per_step(t))) for t in _sizes(curve)]
        chart.line(points, color=color, width=2)
    for i, ((about, _), color) in enumerate(zip(traces, _colors(), strict=False)):
        chart.dot(30, 356 + 20 * i, color)
        chart.text(
            40, 360 + 20 * i, _label(about) + (", grey: its layers" if len(traces) == 1 else "")
        )
    return chart.to_svg()


def _label(about: dict[str, Any]) -> str:
    source = "MADE UP, by no model" if about["source"] == "made up" else about["note"]
    return (
        f"{about['algorithm']}, budget {about['settings'].get('budget', '?')}, context "
        f"{about['context'][0]:,}: {source}"[:120]
    )


def _colors() -> tuple[Color, ...]:
    return _COLORS * 20


def _sizes(curve: HitCurve) -> list[int]:
    """Tokens, in equal steps of their logarithm."""
    low, high = curve.widest, max(curve.widest + 1, curve.hits.shape[-1] - 1)
    pages = {round(low * (high / low) ** (i / _POINTS)) for i in range(_POINTS + 1)}
    return [count * curve.page_size for count in sorted(pages)]


def _powers(low: int, high: int) -> list[tuple[float, str]]:
    tokens = 1 << (low - 1).bit_length()
    found: list[tuple[float, str]] = []
    while tokens <= high:
        found.append((tokens, f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)))
        tokens *= 2
    return found


def _grid(
    chart: Chart,
    x: Axis,
    y: Axis,
    x_ticks: Sequence[tuple[float, str]],
    y_ticks: Sequence[tuple[float, str]],
) -> None:
    chart.grid_y(y, y_ticks, (x.start, x.end))
    chart.grid_x(x, x_ticks, (_TOP, _BOTTOM))
    label = "device_buffer_size, tokens"
    chart.text((x.start + x.end) / 2, _BOTTOM + 34, label, size=11, anchor="middle")
