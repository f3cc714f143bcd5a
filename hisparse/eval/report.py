"""Reports of results as Markdown or HTML, and results read back from files."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hisparse.errors import ConfigError, one_line, quoted
from hisparse.eval.method import DENSE
from hisparse.eval.pareto import pareto_lines
from hisparse.eval.result_types import Result
from hisparse.eval.tables import FIGURES, Cell, Table, make_tables
from hisparse.options import check_fields, read_object

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
        if file.suffix == ".html":
            from hisparse.eval.html_page import to_html

            page = to_html(results, line)
        else:
            page = to_markdown(results, line)
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
        check_fields(where, result, Result)
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
            parts += [f"### {table.title}", _table(table), table.note]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(table: Table) -> str:
    rows = [table.heads, ["---"] * len(table.heads)]
    rows += [[_text(cell) for cell in row] for row in table.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _text(cell: Cell) -> str:
    return f"[{cell.text}]" if cell.grey else cell.text
