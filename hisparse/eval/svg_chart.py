"""Small charts as SVG text: one element a line, no plotting library, the same bytes each time.

The background is part of the picture, so a page's light or dark theme does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

__all__ = ["INK", "Axis", "Chart", "Color"]

#: A CSS colour.
Color = str
#: Colour of text and axes.
INK: Color = "#1f2328"
_FAINT: Color = "#d8dee4"
_CARD = f'fill="#ffffff" stroke="{_FAINT}"'
_FONT = "font-family=\"system-ui, 'Segoe UI', Helvetica, Arial, sans-serif\""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Maps a value to a pixel; a larger value may lie at a smaller pixel.

    Attributes:
        low, high: values at the ends.
        start, end: pixels at the ends.
        log: whether equal ratios are equally far apart.
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
        title: read out by screen readers.
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
        turned: bool = False,
        color: Color = INK,
    ) -> None:
        """A line of text with its baseline at ``y``; ``turned`` reads upwards."""
        more = ' font-weight="600"' if bold else ""
        more += f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{color}"{more}>{escape(text)}</text>'
        )

    def line(
        self,
        points: Sequence[tuple[float, float]],
        *,
        color: Color = INK,
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
