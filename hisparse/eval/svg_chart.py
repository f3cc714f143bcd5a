"""Small charts as SVG, one element per line and the same bytes each time, without matplotlib.

A chart has its own background, so that it is readable on pages with a light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

__all__ = ["Axis", "Chart", "Color"]

#: A CSS colour.
Color = str
#: Colours of text and grid lines.
_INK: Color = "#1f2328"
_FAINT: Color = "#d8dee4"
_CARD = f'fill="#ffffff" stroke="{_FAINT}"'
_FONT = "font-family=\"system-ui, 'Segoe UI', Helvetica, Arial, sans-serif\""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Maps values to pixels, upwards or downwards.

    Attributes:
        low, high: values at the ends.
        start, end: pixels at the ends.
        log: whether the scale is logarithmic.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        low, high, value = ((math.log(x) if self.log else x) for x in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (value - low) / (high - low)


@dataclass(kw_only=True)
class Chart:
    """SVG elements in the order in which they are drawn.

    Attributes:
        width, height: pixels.
        title: alternative text for screen readers.
    """

    width: int
    height: int
    title: str
    _parts: list[str] = field(default_factory=list, init=False)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 12,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """A line of text with its baseline at ``y``."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{_INK}"{weight}>{escape(text)}</text>'
        )

    def line(
        self,
        points: Sequence[tuple[float, float]],
        *,
        color: Color = _INK,
        width: float = 1,
        dashed: bool = False,
    ) -> None:
        """A line through all points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{dash}/>'
        )

    def dot(self, x: float, y: float, color: Color) -> None:
        """A filled circle."""
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>')

    def grid_x(
        self, axis: Axis, ticks: Sequence[tuple[float, str]], y: tuple[float, float]
    ) -> None:
        """Vertical grid lines from ``y[0]`` down to ``y[1]``, each with its label below."""
        for value, label in ticks:
            self.line([(axis(value), y[0]), (axis(value), y[1])], color=_FAINT)
            self.text(axis(value), y[1] + 16, label, size=11, anchor="middle")

    def grid_y(
        self, axis: Axis, ticks: Sequence[tuple[float, str]], x: tuple[float, float]
    ) -> None:
        """Horizontal grid lines from ``x[0]`` to ``x[1]``, each with its label on the left."""
        for value, label in ticks:
            self.line([(x[0], axis(value)), (x[1], axis(value))], color=_FAINT)
            self.text(x[0] - 6, axis(value) + 4, label, size=11, anchor="end")

    def to_svg(self) -> str:
        """The whole file."""
        size = f'width="{self.width}" height="{self.height}"'
        box = f'x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="8"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {_FONT} '
                f'viewBox="0 0 {self.width} {self.height}">',
                f"<title>{escape(self.title)}</title>",
                f"<rect {box} {_CARD}/>",
                *self._parts,
                "</svg>\n",
            ]
        )
