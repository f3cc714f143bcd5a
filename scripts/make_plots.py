"""Draw the pictures of README and docs from committed results; ``make docs`` runs it.

``python -m scripts.make_plots KIND RESULT.json [RESULT.json ...] OUT.svg`` draws what was printed
by ``hisparse eval --json`` ("quality"), ``eval --ruler --json`` ("ruler"), ``bench decode --json``
("speed"; "misses" with ``--miss host`` or ``auto``) or ``trace replay --json`` ("trace").
"""

from __future__ import annotations

import io
import math
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
from hisparse.eval.results import MEAN
from hisparse.options import read_object

#: Keyword arguments of ``Axes.plot``.
Style = dict[str, Any]

#: Okabe and Ito's colours for the colour-blind, those visible on white and on black.
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c")
_MARKERS = "osD^vPX*"
_INK = "#1f2328"
#: Settings of matplotlib.
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
    """

    title: str
    lines: Mapping[str, Sequence[Point]]
    label: str = ""
    level: float | None = None
    log: str = ""
    ticks: Sequence[float] = ()


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


def trace_figure(traces: Sequence[dict[str, Any]]) -> Figure:
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
            key: [
                Point(tokens, *[scale * value] * 3)
                for tokens, value in zip(
                    about["buffers"], about["policies"]["lru"][name], strict=True
                )
            ]
            for key, about in zip(styles, traces, strict=True)
        }
        sizes = [point.x for points in lines.values() for point in points]
        ticks = [2**i for i in range(32) if min(sizes) <= 2**i <= max(sizes)]
        panels.append(Panel(title=title, label="tokens", lines=lines, log="x", ticks=ticks))
    return draw(panels, styles, title="What LRU buffers would have held")


def capacity_figure(traces: Sequence[dict[str, Any]]) -> Figure:
    """Hits and cost against the capacity of shared caches, for each group of each trace.

    Args:
        traces: what ``hisparse kvcm replay --json`` prints of each trace.
    """
    panels = []
    for file, group in ((x["file"], group) for x in traces for group in x["groups"]):
        where = f"{Path(file).name[:40]}, group {group['group'][:40]}"
        for title, name, scale in (("hits, percent", "hit_rate", 100), (group["unit"], "cost", 1)):
            lines: dict[str, list[Point]] = {}
            for row in group["points"]:
                line = row["policy"] + (f", {row['ttl_s']:g} s" if row["ttl_s"] else "")
                lines.setdefault(line, []).append(Point(row["capacity"], *[scale * row[name]] * 3))
            panels.append(Panel(title=f"{title}: {where}", label="blocks", lines=lines, log="x"))
    styles = make_styles(line for panel in panels for line in panel.lines)
    return draw(panels, styles, title="What shared caches would have held")


def to_svg(figure: Figure) -> str:
    """A figure as SVG, without a date, so that the same figure gives the same file."""
    file, nothing = io.StringIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context(_SETTINGS):
        figure.savefig(file, format="svg", metadata=nothing, facecolor="#ffffff")
    return file.getvalue()[file.getvalue().index("<svg") :]


def draw(
    panels: Sequence[Panel], styles: Mapping[str, Style], *, title: str = "", note: str = ""
) -> Figure:
    """Draw panels, and below them a legend, each line once, in the order of ``styles``."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    present = {name for panel in panels for name in panel.lines}
    legend = [style for name, style in styles.items() if name in present]
    labels = [textwrap.fill(re.sub(",(?=[a-z])", ", ", style["label"]), 60) for style in legend]
    height = 2.6 * rows + 0.8 + 0.1 * sum(label.count("\n") + 1 for label in labels)
    with rc_context(_SETTINGS):
        figure = Figure(figsize=(9.6, height), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
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
        x, y, low, high = zip(*sorted(panel.lines[name]), strict=True)
        if low != high:
            # Shift the lines sideways, so that equal values do not hide each other.
            x = tuple(value * 1.015 ** (i - (len(styles) - 1) / 2) for value in x)
            ax.vlines(x, low, high, colors=style["color"], linewidth=1)
        ax.plot(x, y, **style)
    for name in panel.log:
        getattr(ax, f"set_{name}scale")("log")
        # Plain numbers at 1, 2 and 5 times each power of ten.
        axis = getattr(ax, f"{name}axis")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    if panel.ticks:
        ax.set_xticks(panel.ticks, [f"{tick:,g}" for tick in panel.ticks])
    if panel.level is not None:
        ax.axhline(panel.level, color="gray", linestyle="--", linewidth=1)
    ax.set_title(panel.title)
    ax.set_xlabel(panel.label)


_Z95 = 1.96


def pool_scores(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each method, budget and context: percent of the answers that are correct.

    Over all tasks on which the dense model reaches 90%. ``n`` counts questions, and
    ``intervals`` has a 95% Wilson score interval over them.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        if cell["usable"]:
            key = cell["method"], cell["budget"], cell["context"]
            groups.setdefault(key, []).append(cell)
    lines = []
    for group in groups.values():
        correct, asked = sum(x["score"] * x["n"] for x in group), sum(x["n"] for x in group)
        share, z2 = correct / asked, _Z95**2
        centre = share + z2 / (2 * asked)
        half = _Z95 * math.sqrt(share * (1 - share) / asked + z2 / (4 * asked**2))
        interval = [100 * end / (1 + z2 / asked) for end in (centre - half, centre + half)]
        line = {"n": asked, "score": 100 * share, "intervals": {"score": interval}}
        lines.append(group[0] | line)
    return lines


def _points(lines: Sequence[dict[str, Any]], name: str) -> dict[str, list[Point]]:
    """A figure of each method against the tokens attended, with its interval."""
    points: dict[str, list[Point]] = {}
    for line in lines:
        x = line["kept_mean"] or line["context"]
        points.setdefault(line["method"], []).append(Point(x, line[name], *line["intervals"][name]))
    return points


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
    scores, asked = _points(pooled, "score"), pooled[0]["n"]
    x: dict[str, Any] = {"label": "tokens attended per step, mean", "ticks": (128, 256, 512)}
    left = f"Questions answered correctly, percent of {asked}"
    right = "KL divergence from dense attention, nats per token"
    panels = (
        Panel(title=left, lines=scores, level=scores[DENSE][0].y, log="x", **x),
        Panel(title=right, lines=_points(result["summary"], "kl"), log="xy", **x),
    )
    source = f"{result['model']}, {result['machine']}, commit {result['commit'][:7]}."
    return draw(
        panels,
        styles,
        title=f"Quality against tokens attended per step, of {result['context'][0]:,} tokens",
        note=f"{source} Bars are 95% intervals. Dashed: dense attention.",
    )


def ruler_figure(result: dict[str, Any]) -> Figure:
    """RULER's mean score against tokens attended, and against bytes that a method keeps of a token.

    Args:
        result: object that ``hisparse eval --ruler --json`` printed.
    """
    found = [cell for cell in result["cells"] if cell["task"] == MEAN]
    dense, cells = found[0], found[1:]
    points: list[dict[str, list[Point]]] = [{}, {}]
    budgets = sorted({cell["budget"] for cell in cells})
    for cell in cells:
        y = [100 * cell[name] for name in ("score", "low", "high")]
        name = cell["method"].replace("selection_scope=query_head", "per query head")
        if cell["algorithm"] == "dipr":  # Its range takes the place of a budget.
            name = "dipr, by alpha"
        points[0].setdefault(name, []).append(Point(cell["kept_mean"], *y))
        # The smallest budget separates methods most. The oracle stores all keys.
        if cell["budget"] == budgets[0] and name != "oracle":
            points[1].setdefault(name, []).append(Point(cell["bytes_per_token"], *y))
    level = 100 * dense["score"]
    panels = (
        Panel(
            title=f"Score of {dense['n']} prompts, percent",
            lines=points[0],
            label="tokens attended per step, mean",
            level=level,
            log="x",
            ticks=budgets,
        ),
        Panel(
            title=f"The same, with a budget of {budgets[0]}",
            lines=points[1],
            label="device bytes a token beside K and V, all layers",
            level=level,
        ),
    )
    source = f"{result['model']}, {result['machine']}, commit {result['commit'][:7]}."
    return draw(
        panels,
        make_styles(points[0]),
        title=f"RULER at {result['context'][0]:,} tokens: the tasks that dense attention can do",
        note=f"{source} Bars are 95% intervals over prompts. Dashed: dense attention.",
    )


def _passed(reports: Sequence[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The machine and commit of reports of ``bench decode``, and all their cases.

    Raises:
        ConfigError: the reports have different machines or commits, or a gate failed.
    """
    sources = sorted({f"{report['machine']}, commit {report['commit'][:7]}" for report in reports})
    if len(sources) != 1:
        raise ConfigError(f"got reports of {'; '.join(sources)}; expected one machine and commit")
    cases = [case for report in reports for case in report["cases"]]
    for case in cases:
        if case["gate"] != "passed":
            raise ConfigError(f"the gate of {case['name']!r} failed; expected reports that passed")
    return sources[0], cases


#: GB/s of the links that :func:`misses_figure` simulates.
_LINKS = (12.5, 25, 50)


def misses_figure(reports: Sequence[dict[str, Any]]) -> Figure:
    """A decode step against its missing pages, over links that are simulated.

    The steps ran on a CPU, whose copies have no link: the time of the missing pages' load is taken
    out of both steps, and "transfer" waits for their bytes at the link's rate instead. A load of
    "host" runs beside the forward. The second panel has what a step does for missing pages alone,
    for the device's share of the step is this CPU's too: it does not depend on the device.

    Args:
        reports: objects that ``hisparse bench decode --miss host --json`` printed on a CPU.

    Raises:
        ConfigError: see :func:`_passed`.
    """
    source, cases = _passed(reports)
    panels: list[dict[str, list[Point]]] = [{}, {}]
    for case in cases:
        params = case["params"]
        x, away = 100 * params["miss_ratio"], params["away"]
        medians = {each["impl"]: each["median_us"] for each in case["results"]}
        waits = {f"transfer, {rate} GB/s": away["bytes"] / rate / 1e3 for rate in _LINKS}
        rest = medians["cpu"] - away["load_us"]
        steps = {name: rest + us for name, us in waits.items()}
        steps["host"] = medians["cpu_host"] - away["load_us"]
        waits["host"] = away["attend_us"]
        for panel, lines in zip(panels, (steps, waits), strict=True):
            for name, us in lines.items():
                panel.setdefault(name, []).append(Point(x, *[us] * 3))
    titles = "A layer's step on this CPU, us", "Of it, for missing pages, us"
    label, ticks = "missing of the selected pages, percent", (5, 15, 50, 100)
    note = (
        f"{source}. {params['context']:,} tokens, {params['budget']:,} attended, "
        f"{params['dtype']}, {params['threads']} threads. Links are simulated: bytes over the "
        "rate take the place of the copy's time."
    )
    return draw(
        [
            Panel(title=title, lines=lines, label=label, log=log, ticks=ticks)
            for title, lines, log in zip(titles, panels, ("x", "xy"), strict=True)
        ],
        make_styles(panels[0]),
        title="Missing pages: brought over a link, or attended by the CPU",
        note=note,
    )


def speed_figure(reports: Sequence[dict[str, Any]]) -> Figure:
    """The README's plot of decode speed: medians of each implementation, with p10 to p90.

    Args:
        reports: objects that ``hisparse bench decode --json`` printed.

    Raises:
        ConfigError: see :func:`_passed`.
    """
    source, _ = _passed(reports)
    cases = [(report, case) for report in reports for case in report["cases"]]
    params, names = {}, {"torch_native": "SGLang torch_native, dense"}
    names["sdpa"] = "PyTorch SDPA, dense"
    with rc_context(_SETTINGS):
        figure = Figure(figsize=(9.6, 1.2 * len(cases) + 1), layout="constrained")
        axes = figure.subplots(len(cases), squeeze=False, sharex=True).flat
        for ax, (report, case) in zip(axes, cases, strict=True):
            params, results = case["params"], case["results"]
            missing = params["miss_ratio"]
            where = f"{missing:.0%} of the selected pages from host" if missing else "all resident"
            title = f"{params['context']:,} tokens of context, {params['dtype']}; {where}"
            if sets := report.get("instruction_sets"):  # Older reports do not say.
                title += f"; {sets['kernels']} kernels"
            ms = [[x[f"{name}_us"] / 1000 for x in results] for name in ("median", "p10", "p90")]
            labels = [names.get(x["impl"], f"hisparse, {params['algorithm']}") for x in results]
            ax.plot(ms[0], labels, "o", color="#0072b2")
            ax.hlines(labels, ms[1], ms[2], color="#0072b2")
            for label, median in zip(labels, ms[0], strict=True):
                side = {"transform": ax.get_yaxis_transform(), "verticalalignment": "center"}
                ax.text(1.01, label, f"{median:.3g} ms", **side)
            ax.set(title=title, xscale="log", ylim=(-0.5, len(labels) - 0.5))
            ax.xaxis.set_major_formatter("{x:g}")
            ax.invert_yaxis()
        shapes = (
            f"{params['batch']} request, {params['q_heads']} query and {params['kv_heads']} KV "
            f"heads x {params['head_dim']}, {params['threads']} threads; hisparse attends "
            f"{params['budget']:,} tokens, selection and transfers included. Medians, p10 to p90."
        )
        title = "Attention of one layer in one decode step, ms"
        figure.suptitle("\n".join([title, *textwrap.wrap(f"{source}. {shapes}", 120)]))
    return figure


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
    "ruler": lambda files: ruler_figure(_read(files[0])),
    "speed": lambda files: speed_figure(list(map(_read, files))),
    "misses": lambda files: misses_figure(list(map(_read, files))),
    "trace": lambda files: trace_figure([x for file in files for x in _read(file)["traces"]]),
    "capacity": lambda files: capacity_figure([x for file in files for x in _read(file)["traces"]]),
}


if __name__ == "__main__":
    sys.exit(main())
