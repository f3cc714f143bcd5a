"""All plots: of the HTML report, the README, recorded traces and load tests. Needs matplotlib.

``python -m hisparse.eval.plots KIND RESULT.json [RESULT.json ...] OUT.svg`` draws what was printed
by ``hisparse eval --json`` ("quality"), ``bench decode --json`` ("speed") or ``trace replay
--json`` ("trace"). ``make docs`` runs it on committed results.
"""

from __future__ import annotations

import io
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from hisparse.errors import ConfigError, HiSparseError, one_line
from hisparse.eval.method import DENSE
from hisparse.eval.results import number, pool_scores
from hisparse.options import read_object

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
        panel = Panel(title=title, lines=_figures(own, "kl", "budget"), log="x", unit="")
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
    return [(title, note, _draw(panels, styles)) for title, note, panels in plots if panels]


def quality_figure(result: dict[str, Any]) -> Figure:
    """The README's plot of quality against the tokens attended per step.

    Args:
        result: object that ``hisparse eval --json`` printed.

    Raises:
        ConfigError: the result has several contexts.
    """
    if len(result["context"]) != 1:
        raise ConfigError(f"got contexts {result['context']}, expected a result with one context")
    methods = ("oracle", "sketch", "quest", "streaming", "dipr")
    # As recorded while there was a choice of the index.
    finest = "alpha=0.003,device_buffer_size=512,index=flat,page_size=1,selection_scope=query_head"
    styles = make_styles([*methods, f"dipr({finest})"])
    styles[f"dipr({finest})"]["label"] = "dipr, per query head, pages of 1 token"
    pooled = pool_scores(result["cells"])
    scores, asked = _figures(pooled, "score", "kept_mean"), pooled[0]["n"]
    x: dict[str, Any] = {"label": "tokens attended per step, mean", "ticks": (128, 256, 512)}
    left = f"Questions answered correctly, percent of {asked}"
    right = "KL divergence from dense attention, nats per token"
    panels = (
        Panel(title=left, lines=scores, level=scores[DENSE][0].y, log="x", **x),
        Panel(title=right, lines=_figures(result["summary"], "kl", "kept_mean"), log="xy", **x),
    )
    source = f"{result['model']}, {result['machine']}, commit {result['commit'][:7]}."
    return _draw(
        panels,
        styles,
        title=f"Quality against tokens attended per step, of {result['context'][0]:,} tokens",
        note=f"{source} Bars are 95% intervals. Dashed: dense attention.",
    )


def speed_figure(reports: Sequence[dict[str, Any]]) -> Figure:
    """The README's plot of decode speed: medians of each implementation, with p10 to p90.

    Args:
        reports: objects that ``hisparse bench decode --json`` printed.

    Raises:
        ConfigError: the reports have different machines or commits, or a gate failed.
    """
    sources = sorted({f"{report['machine']}, commit {report['commit'][:7]}" for report in reports})
    if len(sources) != 1:
        raise ConfigError(f"got reports of {'; '.join(sources)}; expected one machine and commit")
    panels, params = [], {}
    for report, case in [(x, case) for x in reports for case in x["cases"]]:
        if case["gate"] != "passed":
            raise ConfigError(f"the gate of {case['name']!r} failed; expected reports that passed")
        params, lines = case["params"], {}
        names = {"torch_native": "SGLang torch_native, dense", "sdpa": "PyTorch SDPA, dense"}
        for timing in case["results"]:
            name = names.get(timing["impl"], f"hisparse, {params['algorithm']}")
            ms = (timing[f"{x}_us"] / 1000 for x in ("median", "p10", "p90"))
            lines[name] = [Point(0, *ms)]
        missing = params["miss_ratio"]
        where = f"{missing:.0%} of the selected pages from host" if missing else "all resident"
        title = f"{params['context']:,} tokens of context, {params['dtype']}; {where}"
        if sets := report.get("instruction_sets"):  # Older reports do not say.
            title += f"; {sets['kernels']} kernels"
        ticks = (1, 3, 10, 30, 100, 300)
        panels.append(Panel(title=title, lines=lines, log="x", ticks=ticks, unit=" ms"))
    shapes = (
        f"{params['batch']} request, {params['q_heads']} query and {params['kv_heads']} KV heads x "
        f"{params['head_dim']}, {params['threads']} threads; hisparse attends "
        f"{params['budget']:,} tokens, selection and transfers included. Medians, p10 to p90."
    )
    styles = make_styles(name for panel in panels for name in panel.lines)
    title, note = "Attention of one layer in one decode step, ms", f"{sources[0]}. {shapes}"
    return _draw(panels, styles, title=title, note=note)


def trace_figure(traces: Sequence[Line]) -> Figure:
    """Hit ratio and bytes against the size of the buffer.

    Args:
        traces: what ``hisparse trace replay --json`` prints of each trace.
    """
    styles = make_styles(map(str, range(len(traces))))
    for style, about in zip(styles.values(), traces, strict=True):
        source = "MADE UP, by no model" if about["source"] == "made up" else about["note"]
        budget = about["settings"].get("budget", "?")
        label = f"{about['algorithm']}, budget {budget}, context {about['context'][0]:,}: {source}"
        style["label"] = label[:120]
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
    return _draw(panels, styles, title="What LRU buffers would have held")


def load_figure(
    throughput: Mapping[str, Sequence[Point]], token_ms: Mapping[str, Sequence[Point]], title: str
) -> Figure:
    """Output tokens per second against the load, and ms per token against the context."""
    panels = [
        Panel(title="Output tokens per second", lines=throughput, label="concurrency or rate"),
        Panel(title="Median time per token, ms", lines=token_ms, label="tokens of context"),
    ]
    note = "" if throughput else "No figures: nothing was completed, or the check failed."
    return _draw(panels, make_styles([*throughput, *token_ms]), title=title, note=note)


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the results of all files but the last into the last; return the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    if len(words) < 3 or words[0] not in _KINDS:
        print(f"usage: {'|'.join(_KINDS)} RESULT.json [RESULT.json ...] OUT.svg", file=sys.stderr)
        return 2
    kind, *names, out = words
    try:
        svg = to_svg(_KINDS[kind](names))
    except HiSparseError as error:
        print(f"hisparse: error: {error}", file=sys.stderr)
        return 1
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        print(
            f"hisparse: error: {', '.join(names)}: nothing to draw: {one_line(error)}",
            file=sys.stderr,
        )
        return 1
    Path(out).write_text(svg, encoding="utf-8")
    return 0


def _read(file: str) -> dict[str, Any]:
    return read_object(file, "RESULT", '{"command": "eval", ...}')


_KINDS: dict[str, Callable[[Sequence[str]], Figure]] = {
    "quality": lambda files: quality_figure(_read(files[0])),
    "speed": lambda files: speed_figure(list(map(_read, files))),
    "trace": lambda files: trace_figure([x for file in files for x in _read(file)["traces"]]),
}


def _figures(lines: Sequence[Line], name: str, x: str) -> dict[str, list[Point]]:
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
            if points := _figures(own, name, "budget"):
                title, x = f"{label}, context {context:,}", "budget, tokens"
                panels.append(
                    Panel(title=title, lines=points, label=x, level=level, log=log, ticks=budgets)
                )
    return panels


def _draw(
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


if __name__ == "__main__":
    sys.exit(main())
