"""Plots at a fixed budget: divergence, hit ratios, and tokens kept by layer and head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hisparse.eval.plot_style import Style, legend, log_axis, make_axes, wrap

__all__ = ["divergence", "hit_ratio", "kept_by_head"]

Line = dict[str, Any]


def divergence(summary: Sequence[Line], styles: dict[str, Style]) -> Figure | None:
    """KL divergence: a panel for each context and budget with a row for each method."""
    panels = _panels(summary)
    if not panels:
        return None
    names = [name for name in styles if any(line["method"] == name for line in summary)]
    figure, axes = make_axes(len(panels), 2, height=0.9 + 0.28 * len(names))
    for ax, ((context, budget), lines) in zip(axes, panels.items(), strict=True):
        for line in lines:
            y, (low, high) = -names.index(line["method"]), line["intervals"]["kl"]
            style = styles[line["method"]]
            ax.plot([line["kl"]], [y], **style)
            ax.hlines(y, low, high, colors=style["color"], linewidth=1.5)
        ax.set_title(f"budget {budget:,}, context {context:,}")
        if ax is not axes[0]:
            ax.sharex(axes[0])
        ax.set_xscale("log")
        log_axis(ax.xaxis)
        ax.set_xlabel("KL to dense, nats")
        ax.set_ylim(-len(names) + 0.4, 0.6)
        ax.set_yticks([])
    legend(figure, names, styles)
    return figure


def hit_ratio(summary: Sequence[Line], styles: dict[str, Style]) -> Figure | None:
    """Hit ratio against buffer size: a panel for each context and budget."""
    panels = _panels([line for line in summary if line["hit_ratio"]])
    if not panels:
        return None
    figure, axes = make_axes(len(panels), 2)
    for ax, ((context, budget), lines) in zip(axes, panels.items(), strict=True):
        for line in lines:
            sizes = [float(name.removesuffix("x")) for name in line["hit_ratio"]]
            ax.plot(sizes, list(line["hit_ratio"].values()), **styles[line["method"]])
        ax.set_title(f"budget {budget:,}, context {context:,}")
        if ax is not axes[0]:
            ax.sharey(axes[0])
        ax.set_xlabel("buffer size, budgets")
        ax.set_ylabel("hit ratio")
        ax.set_ylim(top=1.02)
    legend(figure, [x["method"] for lines in panels.values() for x in lines], styles)
    return figure


def kept_by_head(summary: Sequence[Line]) -> Figure | None:
    """Tokens kept: a panel for each method, budget and context where heads differ."""
    found = [(line, _matrix(line)) for line in summary if line["kept_by_head"]]
    found = [(line, kept) for line, kept in found if np.nanmax(kept) - np.nanmin(kept) > 1]
    if not found:
        return None
    figure, axes = make_axes(len(found), 3, height=3.4)
    most = max(float(np.nanmax(kept)) for _, kept in found)
    for ax, (line, kept) in zip(axes, found, strict=True):
        image = ax.imshow(kept, aspect="auto", vmin=0, vmax=most, interpolation="nearest")
        ax.set_title(f"{wrap(line['method'], 34)}\n{line['budget']:,} of {line['context']:,}")
        ax.set_xlabel("head of the selection")
        ax.set_ylabel("layer")
        ax.grid(visible=False)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ax=axes, label="tokens kept", shrink=0.8)
    return figure


def _panels(lines: Sequence[Line]) -> dict[tuple[int, int], list[Line]]:
    """Summary lines grouped and sorted by context and budget."""
    found: dict[tuple[int, int], list[Line]] = {}
    for line in sorted(lines, key=lambda x: (x["context"], x["budget"])):
        found.setdefault((line["context"], line["budget"]), []).append(line)
    return found


def _matrix(line: Line) -> np.ndarray:
    """``[L, H]``, NaN for layers without a selection of their own."""
    layers = line["kept_by_head"]
    heads = max(len(layer) for layer in layers if layer is not None)
    return np.array([[np.nan] * heads if layer is None else layer for layer in layers])
