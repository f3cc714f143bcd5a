"""The report: results as a page of Markdown or HTML, and results read back from files."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hisparse.errors import ConfigError
from hisparse.eval.pareto import pareto_lines
from hisparse.eval.tables import Cell, Table, make_tables

__all__ = ["check_reports", "read_result", "to_markdown", "write_reports"]

_SUFFIXES = (".md", ".html")
#: What a result needs to have, and a line of its summary, which older ones lack.
_NEEDED = {"model", "line", "date", "machine", "versions", "commit", "cells", "summary"}
_NEEDED_OF_A_LINE = {"intervals", "resampled", "kept_by_head", "hit_ratio", "selection_scope"}


def check_reports(files: Sequence[Path]) -> None:
    """Whether reports can be written, before anything runs.

    Raises:
        ConfigError: a suffix is unknown, a folder is missing, or HTML is asked for and there is no
            matplotlib.
    """
    for file in files:
        if file.suffix not in _SUFFIXES:
            raise ConfigError(
                f"--report: got {str(file)!r}, expected a name that ends in .md or .html"
            )
        if not file.parent.is_dir():
            raise ConfigError(f"--report: got {str(file)!r}, but {str(file.parent)!r} is no folder")
    if any(f.suffix == ".html" for f in files) and not importlib.util.find_spec("matplotlib"):
        raise ConfigError("--report as HTML needs matplotlib: pip install 'hisparse[eval]'")


def write_reports(files: Sequence[Path], results: Sequence[dict[str, Any]], line: str) -> None:
    """Write each file in the form that its suffix says.

    Args:
        files: as :func:`check_reports` accepts them.
        results: what ``hisparse eval --json`` prints, a section each.
        line: the command that makes the report.
    """
    for file in files:
        if file.suffix == ".html":
            from hisparse.eval.html_page import to_html

            page = to_html(results, line)
        else:
            page = to_markdown(results, line)
        file.write_text(page, encoding="utf-8")


def read_result(file: Path) -> dict[str, Any]:
    """A result that ``hisparse eval --json`` printed.

    Raises:
        ConfigError: the file cannot be read, or is no such result.
    """
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--from: cannot read {str(file)!r}: {error.strerror}") from None
    except ValueError:
        result = None
    if not isinstance(result, dict) or result.get("command") != "eval" or _NEEDED - result.keys():
        raise ConfigError(
            f"--from: {str(file)!r} is no result of an evaluation; expected what "
            "`hisparse eval --json` prints of its own tasks"
        )
    summary = result["summary"]
    if not isinstance(summary, list) or not all(isinstance(line, dict) for line in summary):
        raise ConfigError(f"--from: {str(file)!r}: its summary is no list of objects")
    absent = {key for line in summary for key in _NEEDED_OF_A_LINE - line.keys()}
    if absent:
        raise ConfigError(
            f"--from: {str(file)!r} lacks {', '.join(sorted(absent))}: an older hisparse made it; "
            "run the evaluation again"
        )
    return result


def to_markdown(results: Sequence[dict[str, Any]], line: str) -> str:
    """The page; arguments as for :func:`write_reports`."""
    parts = ["# Quality of sparse attention"]
    if any(result["line"] != line for result in results):
        parts.append(f"Made by `{line}`.")
    for result in results:
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        source = f" ({result['model_source']})" if result.get("model_source") else ""
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
