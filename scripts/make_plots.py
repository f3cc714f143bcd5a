"""Draw the pictures of README and docs from committed results; ``make docs`` runs it.

``python -m scripts.make_plots KIND RESULT.json [RESULT.json ...] OUT.svg`` draws what was printed
by ``hisparse eval --json`` ("quality"), ``bench decode --json`` ("speed") or ``trace replay
--json`` ("trace").
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hisparse.errors import ConfigError, HiSparseError, one_line
from hisparse.eval.method import DENSE
from hisparse.eval.plots import Panel, Point, draw, figures, make_styles, to_svg, trace_figure
from hisparse.eval.results import pool_scores
from hisparse.options import read_object


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
    scores, asked = figures(pooled, "score", "kept_mean"), pooled[0]["n"]
    x: dict[str, Any] = {"label": "tokens attended per step, mean", "ticks": (128, 256, 512)}
    left = f"Questions answered correctly, percent of {asked}"
    right = "KL divergence from dense attention, nats per token"
    panels = (
        Panel(title=left, lines=scores, level=scores[DENSE][0].y, log="x", **x),
        Panel(title=right, lines=figures(result["summary"], "kl", "kept_mean"), log="xy", **x),
    )
    source = f"{result['model']}, {result['machine']}, commit {result['commit'][:7]}."
    return draw(
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
    return draw(panels, styles, title=title, note=note)


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


if __name__ == "__main__":
    sys.exit(main())
