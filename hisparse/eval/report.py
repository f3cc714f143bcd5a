"""Reports of results as Markdown or HTML, and results read back from files."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hisparse.errors import ConfigError, one_line, quoted
from hisparse.eval.method import DENSE
from hisparse.eval.results import EvalResult, number
from hisparse.options import check_fields, read_object

_STYLE = """\
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 96rem; margin: 2rem auto; padding: 0 1rem }
table, .wide { display: block; overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { padding: .2rem .7rem; text-align: right; white-space: nowrap }
th { border-bottom: 2px solid }
td { border-bottom: 1px solid color-mix(in srgb, currentColor 20%, transparent) }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 16rem }
.grey { opacity: .5 }
table + p, .note { max-width: 60rem; font-size: 13px }
code { font-size: 12px; overflow-wrap: anywhere }
svg { max-width: 100%; height: auto }
"""
_SUFFIXES = (".md", ".html")
_TITLE = "Quality of sparse attention"
_INTRODUCTION = (
    "Each section compares methods of sparse attention with dense attention on one model: correct "
    "answers, divergence and perplexity, the attention that a budget keeps, and cache hits."
)


def to_markdown(results: Sequence[dict[str, Any]], line: str) -> str:
    """The report as Markdown.

    Args:
        results: objects that ``hisparse eval --json`` printed, a section for each.
        line: the command that writes the report.
    """
    return "\n\n".join([_head(results, line), *map(_section, results)]) + "\n"


def to_html(results: Sequence[dict[str, Any]], line: str) -> str:
    """The report as HTML: that in Markdown, and plots. Arguments as for :func:`to_markdown`."""
    from markdown_it import MarkdownIt

    from hisparse.eval.plots import make_styles, report_plots, to_svg

    render = MarkdownIt("commonmark", {"html": False}).enable("table").render
    styles = make_styles(
        x["method"] for result in results for x in result["summary"] if x["method"] != DENSE
    )
    page = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_TITLE}</title>\n<style>\n{_STYLE}</style>\n</head>\n<body>",
        render(_head(results, line)),
    ]
    for place, result in enumerate(results):
        text = render(_section(result))
        page += ["<section>", re.sub(r"<td>(\[.*?\])</td>", r'<td class="grey">\1</td>', text)]
        for i, (title, note, figure) in enumerate(report_plots(result, styles)):
            svg = to_svg(figure, f"s{place}p{i}")
            page += [
                f'<h3>{title}</h3>\n<p class="note">{note}</p>',
                f'<div class="wide" role="img" aria-label="{title}">{svg}</div>',
            ]
        page.append("</section>")
    return "\n".join([*page, "</body>\n</html>\n"])


def _head(results: Sequence[dict[str, Any]], line: str) -> str:
    parts = [f"# {_TITLE}", _INTRODUCTION]
    if any(result["line"] != line for result in results):
        parts.append(f"Made by `{line}`.")
    return "\n\n".join(parts)


def _section(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    source = f" ({result['model_source']})" if result["model_source"] else ""
    parts = [
        f"## {result['model']}{source}",
        f"`{result['line']}`",
        f"{result['date']}, commit {result['commit']}, {result['machine']}; {versions}",
        "\n".join(f"- {words}" for words in pareto_lines(result["summary"])),
    ]
    for table in make_tables(result):
        rows = [table.heads, ["---"] * len(table.heads), *table.rows]
        lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
        lines = [f"| {text} |" for text in lines]
        parts += [f"### {table.title}", "\n".join(lines), table.note]
    return "\n\n".join(part for part in parts if part)


def check_reports(files: Sequence[Path]) -> None:
    """Check before a run that its reports can be written.

    Raises:
        ConfigError: a suffix is unknown, a folder is missing, or a report is HTML and matplotlib is
            not installed.
    """
    for file in files:
        if file.suffix not in _SUFFIXES:
            raise ConfigError(
                f"--report: got {str(file)!r}, expected a name that ends in .md or .html"
            )
        if not file.parent.is_dir():
            raise ConfigError(
                f"--report: got {str(file)!r}, expected a file in a folder that exists; "
                f"{str(file.parent)!r} does not"
            )
    if any(file.suffix == ".html" for file in files):
        check_matplotlib("--report as HTML")


def check_matplotlib(flag: str) -> None:
    """Check before a run that its plots can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if not importlib.util.find_spec("matplotlib"):
        raise ConfigError(f"{flag} needs matplotlib: pip install 'hisparse[eval]'")


def write_reports(files: Sequence[Path], results: Sequence[dict[str, Any]], line: str) -> None:
    """Write a report to each file, in the format of its suffix.

    Args:
        files: accepted by :func:`check_reports`.
        results: objects that ``hisparse eval --json`` printed, a section for each.
        line: the command that writes the report.

    Raises:
        ConfigError: figures contradict each other, or a file cannot be written.
    """
    try:
        for file in files:
            make = to_html if file.suffix == ".html" else to_markdown
            _write(file, make(results, line))
    except OSError as error:
        raise ConfigError(f"--report: cannot write {error.filename!r}: {error.strerror}") from None
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        # A result may have the right types and still be none that an evaluation printed.
        raise ConfigError(
            f"--report: the figures of a result contradict each other ({one_line(error)}); "
            "expected results that `hisparse eval --json` printed"
        ) from error


def _write(file: Path, text: str) -> None:
    """Write a file that takes the place of an older one only when it is whole.

    Raises:
        OSError: names the file.
    """
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None
    finally:
        partial.unlink(missing_ok=True)


def read_result(file: Path) -> dict[str, Any]:
    """Read a result that ``hisparse eval --json`` printed.

    Raises:
        ConfigError: the file cannot be read, or is not such a result.
    """
    result = read_object(file, "--from", '{"command": "eval", ...}')
    where = f"--from {str(file)!r}"
    try:
        check_fields(where, result, EvalResult)
        for name in ("cells", "summary"):
            for i, line in enumerate(result[name]):
                _check_line(f"{where}: {name}[{i}]", line)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; expected what `hisparse eval --json` of this release prints of its own tasks"
        ) from None
    return result


def _check_line(where: str, line: dict[str, Any]) -> None:
    if line["budget"] is None and line["method"] != DENSE:
        raise ConfigError(f"{where}: got no budget for {quoted(line['method'])}, expected tokens")
    for name in FIGURES:
        if line.get(name) is None:  # A cell has none of these figures.
            continue
        interval = line["intervals"].get(name)
        if interval is None or len(interval) != 2:
            raise ConfigError(
                f"{where}: got {interval} as interval of {name}, expected low and high"
            )


Line = dict[str, Any]


class Table(NamedTuple):
    """A table; ``note`` explains its columns, and each row has a cell for each head.

    A cell in brackets does not rank methods.
    """

    title: str
    note: str
    heads: list[str]
    rows: list[list[str]]


#: Fields of a summary line that have intervals, and their heads.
FIGURES = {
    "kl": "KL",
    "kl_ratio": "KL / oracle",
    "ppl": "ppl",
    "ppl_ratio": "ppl / dense",
    "copy_ppl": "copy ppl",
    "copy_ppl_ratio": "copy / dense",
}
_KEPT = {
    "mass": "mass",
    "oracle_recall": "recall",
    "kept_mean": "kept",
    "kept_p95": "kept p95",
    "capped": "capped",
    "adjacent_overlap": "overlap",
}


def make_tables(result: dict[str, Any]) -> list[Table]:
    """All tables of an object that ``hisparse eval --json`` printed."""
    tables = [_scores(result["cells"]), _divergence(result["summary"]), _kept(result["summary"])]
    return [*tables, _hits(result["summary"])]


def make_short_tables(result: dict[str, Any]) -> list[Table]:
    """The scores and the most telling other figures, for a terminal."""
    kept = ("mass", "kept_mean", "bytes_per_token")
    heads = {"mass": "mass", "kept_mean": "kept", "bytes_per_token": "bytes"}
    short = _table(
        "Compared with dense attention",
        "KL: nats per token. / oracle: KL over that of the exact best pages. ppl, copy: perplexity "
        "over the dense model's. mass: fraction of exact attention kept. kept: tokens attended per "
        "step. bytes: device memory per token for representations.",
        ["KL", "/ oracle", "ppl", "copy", *heads.values()],
        result["summary"],
        lambda line: [
            with_interval(line, "kl"),
            *(number(line[name]) for name in ("kl_ratio", "ppl_ratio", "copy_ppl_ratio", *kept)),
        ],
    )
    return [_scores(result["cells"]), short]


def describe_line(line: Line) -> str:
    """Method, budget and context of a line or cell as a row head."""
    budget = "" if line["method"] == "dense" else f", {line['budget']}"
    return f"{line['method']}{budget} of {line['context']}"


def with_interval(line: Line, name: str) -> str:
    """A value of a summary line and its 95% interval."""
    if line[name] is None:
        return "-"
    low, high = line["intervals"][name]
    return f"{number(line[name])} ({number(low)} to {number(high)})"


def _table(
    title: str,
    note: str,
    heads: Sequence[str],
    lines: Sequence[Line],
    row: Callable[[Line], Sequence[str]],
) -> Table:
    rows = [[describe_line(line), *row(line)] for line in lines]
    return Table(title, note, ["method, budget of context", *heads], rows)


def _scores(cells: Sequence[Line]) -> Table:
    tasks = sorted({cell["task"] for cell in cells})
    rows: dict[str, dict[str, str]] = {}
    counts: dict[str, set[int]] = {task: set() for task in tasks}
    for cell in cells:
        score, low, high = (f"{100 * cell[name]:.0f}" for name in ("score", "low", "high"))
        text = f"{score} ({low} to {high})"
        row = rows.setdefault(describe_line(cell), {})
        row[cell["task"]] = text if cell["usable"] else f"[{text}]"
        counts[cell["task"]].add(cell["n"])
    sizes = {task: "-".join(str(n) for n in sorted({min(x), max(x)})) for task, x in counts.items()}
    heads = ["method, budget of context", *(f"{task} (n {sizes[task]})" for task in tasks)]
    return Table(
        "Correct answers, percent",
        "An answer is correct if all its tokens are the most likely ones. 95% bootstrap intervals "
        "over questions. The interval has no width if all answers are correct or all are wrong: up "
        "to 3 / n of all such questions may still differ. Grey or in brackets: the dense model "
        "scores below 90%, so the task does not rank methods.",
        heads,
        [[name, *(row.get(task, "-") for task in tasks)] for name, row in rows.items()],
    )


def _divergence(lines: Sequence[Line]) -> Table:
    drawn = {
        line["resampled"]: f"{line['resampled']} ({line['documents']} documents)" for line in lines
    }
    return _table(
        "Divergence and perplexity",
        "KL: divergence from the dense next-token distribution on the following text, in pieces of "
        "32 tokens, nats per token. KL / oracle: KL over that of the exact best pages with the "
        "same scope, budget and context. ppl: perplexity of the following text. copy ppl: "
        "perplexity of repeated passages. / dense: over the dense model's. Ratios compare the same "
        "documents and are resampled in pairs. "
        f"95% bootstrap intervals over {'; '.join(drawn.values())}.",
        list(FIGURES.values()),
        lines,
        lambda line: [with_interval(line, name) for name in FIGURES],
    )


def _kept(lines: Sequence[Line]) -> Table:
    def row(line: Line) -> list[str]:
        flat = [x for layer in line["kept_by_head"] or () if layer is not None for x in layer]
        extremes = f"{number(min(flat))} to {number(max(flat))}" if flat else "-"
        if flat and max(flat) - min(flat) < 1:
            extremes = "even"
        values = [number(line[name]) for name in _KEPT]
        return [line["selection_scope"] or "-", *values, extremes, number(line["bytes_per_token"])]

    return _table(
        "What is kept",
        "mass: fraction of exact attention kept. recall: fraction of the n best pages that are "
        "among the n selected pages. kept: tokens attended per step and row; p95: 95th percentile. "
        "capped: fraction of the selections with the largest allowed number of pages. overlap: "
        "fraction of the selected pages that the step before selected too. by head: smallest and "
        "largest mean of kept over heads of layers; even: all equal. bytes: device memory per "
        "token for representations.",
        ["scope", *_KEPT.values(), "by head", "bytes"],
        lines,
        row,
    )


def _hits(lines: Sequence[Line]) -> Table:
    some = [line for line in lines if line["hit_ratio"]]
    sizes = list(some[0]["hit_ratio"]) if some else []
    return _table(
        "Hit ratio by buffer size",
        "Fraction of the selected pages that are already in an LRU buffer of this many budgets.",
        sizes,
        some,
        lambda line: [number(line["hit_ratio"][size]) for size in sizes],
    )


_COSTS = ("kl", "kept_mean", "bytes_per_token")


def pareto_lines(summary: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each context and budget: its methods that no other method dominates.

    A method dominates another if its mean divergence, tokens kept and bytes per token are at most
    as high and one of them is lower. ``oracle``, the ceiling, is left out, and so is a context and
    budget with fewer than two other methods.
    """
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for line in summary:
        if line["method"] != DENSE and line["algorithm"] != "oracle" and line["kept_mean"]:
            groups.setdefault((line["context"], line["budget"]), []).append(line)
    found = []
    for (context, budget), lines in groups.items():
        if len(lines) < 2:
            continue
        best = [x for x in lines if not any(_dominates(other, x) for other in lines)]
        shown = "; ".join(
            f"{x['method']} ({number(x['kl'])} nats, {number(x['kept_mean'])} tokens, "
            f"{number(x['bytes_per_token'])} bytes)"
            for x in sorted(best, key=lambda x: float(x["kl"]))
        )
        found.append(
            f"Budget {budget} of {context}: Pareto front of KL divergence, tokens kept and bytes "
            f"per token, among {len(lines)} methods without the oracle: {shown}."
        )
    return found


def _dominates(a: dict[str, Any], b: dict[str, Any]) -> bool:
    costs = [(a[name], b[name]) for name in _COSTS]
    return all(x <= y for x, y in costs) and any(x < y for x, y in costs)
