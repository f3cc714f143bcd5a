"""Reports of results as Markdown or HTML, and results read back from files."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from hisparse.errors import ConfigError, one_line, quoted
from hisparse.eval.divergence import pareto_lines
from hisparse.eval.method import DENSE
from hisparse.eval.plots import Style, make_styles, report_plots, to_svg
from hisparse.eval.results import EvalResult
from hisparse.eval.tables import FIGURES, Cell, Table, make_tables
from hisparse.options import check_fields, read_object

_STYLE = """\
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 96rem; margin: 2rem auto; padding: 0 1rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { padding: .2rem .7rem; text-align: right; white-space: nowrap }
th { border-bottom: 2px solid }
td { border-bottom: 1px solid color-mix(in srgb, currentColor 20%, transparent) }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 16rem }
.grey { opacity: .5 }
.note { max-width: 60rem; font-size: 13px }
code { font-size: 12px; overflow-wrap: anywhere }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem }
dt { font-weight: 600 }
dd { margin: 0 }
svg { max-width: 100%; height: auto }
"""


def to_html(results: Sequence[dict[str, Any]], line: str) -> str:
    """The report as HTML.

    Args:
        results: objects that ``hisparse eval --json`` printed, a section for each.
        line: the command that writes the report.
    """
    styles = make_styles(
        x["method"] for result in results for x in result["summary"] if x["method"] != DENSE
    )
    is_combined = any(result["line"] != line for result in results)
    sections = [_section(result, styles, f"s{i}") for i, result in enumerate(results)]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>Quality of sparse attention</title>\n<style>\n{_STYLE}</style>\n</head>",
            "<body>\n<h1>Quality of sparse attention</h1>",
            f"<p>Made by <code>{escape(line)}</code></p>" if is_combined else "",
            *sections,
            "</body>\n</html>\n",
        ]
    )


def _section(result: dict[str, Any], styles: dict[str, Style], name: str) -> str:
    plots = [
        f'<h3>{title}</h3>\n<p class="note">{note}</p>\n'
        f'<div class="wide" role="img" aria-label="{title}">{to_svg(figure, f"{name}p{i}")}</div>'
        for i, (title, note, figure) in enumerate(report_plots(result, styles))
    ]
    words = "".join(f"<li>{escape(text)}</li>" for text in pareto_lines(result["summary"]))
    return "\n".join(
        [
            f"<section>\n<h2>{escape(result['model'])}</h2>",
            _provenance(result),
            f"<ul>{words}</ul>" if words else "",
            *map(_table, make_tables(result)),
            *plots,
            "</section>",
        ]
    )


def _provenance(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    shown = {
        "model": result["model_source"] or result["model"],
        "command": result["line"],
        "date": result["date"],
        "commit": result["commit"],
        "machine": result["machine"],
        "versions": versions,
    }
    rows = [f"<dt>{name}</dt><dd><code>{escape(x)}</code></dd>" for name, x in shown.items()]
    return f"<dl>{''.join(rows)}</dl>"


def _table(table: Table) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in table.heads)
    rows = ["".join(map(_cell, row)) for row in table.rows]
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<h3>{escape(table.title)}</h3>\n<div class="wide"><table>\n<thead><tr>{heads}</tr>'
        f"</thead>\n<tbody>\n{body}\n</tbody></table></div>\n"
        f'<p class="note">{escape(table.note)}</p>'
    )


def _cell(cell: Cell) -> str:
    return (
        f'<td class="grey">[{escape(cell.text)}]</td>'
        if cell.grey
        else f"<td>{escape(cell.text)}</td>"
    )


_SUFFIXES = (".md", ".html")
_INTRODUCTION = (
    "Each section compares methods of sparse attention with dense attention on one model: correct "
    "answers, divergence and perplexity, the attention that a budget keeps, and cache hits."
)


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
            raise ConfigError(f"--report: got {str(file)!r}, but {str(file.parent)!r} is no folder")
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
        _write_reports(files, results, line)
    except OSError as error:
        raise ConfigError(f"--report: cannot write {error.filename!r}: {error.strerror}") from None
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        # A result may have the right types and still be none that an evaluation printed.
        raise ConfigError(
            f"--report: the figures of a result contradict each other ({one_line(error)}); "
            "expected results that `hisparse eval --json` printed"
        ) from error


def _write_reports(files: Sequence[Path], results: Sequence[dict[str, Any]], line: str) -> None:
    for file in files:
        page = to_html(results, line) if file.suffix == ".html" else to_markdown(results, line)
        _write(file, page)


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
        raise ConfigError(f"{where}: got no budget for {quoted(line['method'])}")
    for name in FIGURES:
        if line.get(name) is None:  # A cell has none of these figures.
            continue
        interval = line["intervals"].get(name)
        if interval is None or len(interval) != 2:
            raise ConfigError(f"{where}: got {interval} as interval of {name}, not low and high")


def to_markdown(results: Sequence[dict[str, Any]], line: str) -> str:
    """The report as Markdown; arguments as for :func:`write_reports`."""
    parts = ["# Quality of sparse attention", _INTRODUCTION]
    if any(result["line"] != line for result in results):
        parts.append(f"Made by `{line}`.")
    for result in results:
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        source = f" ({result['model_source']})" if result["model_source"] else ""
        parts += [
            f"## {result['model']}{source}",
            f"`{result['line']}`",
            f"{result['date']}, commit {result['commit']}, {result['machine']}; {versions}",
            "\n".join(f"- {words}" for words in pareto_lines(result["summary"])),
        ]
        for table in make_tables(result):
            parts += [f"### {table.title}", _markdown_table(table), table.note]
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown_table(table: Table) -> str:
    rows = [table.heads, ["---"] * len(table.heads)]
    rows += [[_text(cell) for cell in row] for row in table.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _text(cell: Cell) -> str:
    return f"[{cell.text}]" if cell.grey else cell.text
