"""The report as one self-contained HTML page. Needs matplotlib for its plots."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from hisparse.eval.method import DENSE
from hisparse.eval.pareto import pareto_lines
from hisparse.eval.plots import Style, make_styles, report_plots, to_svg
from hisparse.eval.tables import Cell, Table, make_tables

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
