"""Reports of results as Markdown or HTML, and results read back from files."""

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
#: Keys that a result needs, and keys of its summary lines that older releases did not write.
_RESULT_KEYS = {"model", "line", "date", "machine", "versions", "commit", "cells", "summary"}
_SUMMARY_KEYS = {"intervals", "resampled", "kept_by_head", "hit_ratio", "selection_scope"}
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
    if any(f.suffix == ".html" for f in files) and not importlib.util.find_spec("matplotlib"):
        raise ConfigError("--report as HTML needs matplotlib: pip install 'hisparse[eval]'")


def write_reports(files: Sequence[Path], results: Sequence[dict[str, Any]], line: str) -> None:
    """Write a report to each file, in the format of its suffix.

    Args:
        files: accepted by :func:`check_reports`.
        results: objects that ``hisparse eval --json`` printed, a section for each.
        line: the command that writes the report.
    """
    for file in files:
        if file.suffix == ".html":
            from hisparse.eval.html_page import to_html

            page = to_html(results, line)
        else:
            page = to_markdown(results, line)
        file.write_text(page, encoding="utf-8")


def read_result(file: Path) -> dict[str, Any]:
    """Read a result that ``hisparse eval --json`` printed.

    Raises:
        ConfigError: the file cannot be read, or is not such a result.
    """
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--from: cannot read {str(file)!r}: {error.strerror}") from None
    except ValueError:
        result = None
    if (
        not isinstance(result, dict)
        or result.get("command") != "eval"
        or _RESULT_KEYS - result.keys()
    ):
        raise ConfigError(
            f"--from: {str(file)!r} is no result of an evaluation; expected what "
            "`hisparse eval --json` prints of its own tasks"
        )
    summary = result["summary"]
    if not isinstance(summary, list) or not all(isinstance(line, dict) for line in summary):
        raise ConfigError(f"--from: {str(file)!r}: its summary is no list of objects")
    absent = {key for line in summary for key in _SUMMARY_KEYS - line.keys()}
    if absent:
        raise ConfigError(
            f"--from: {str(file)!r} lacks {', '.join(sorted(absent))}: an older hisparse made it; "
            "run the evaluation again"
        )
    return result


def to_markdown(results: Sequence[dict[str, Any]], line: str) -> str:
    """The report as Markdown; arguments as for :func:`write_reports`."""
    parts = ["# Quality of sparse attention", _INTRODUCTION]
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
