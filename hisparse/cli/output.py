"""What the commands print: tables that fit 80 columns, and no warnings of other packages."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

#: Columns that labels get in :func:`print_figures` if not all of them fit beside the figures.
_LABEL_WIDTH = 12


def make_table(*heads: str, right: tuple[str, ...] = (), title: str | None = None) -> Table:
    """A table without vertical lines; its cells wrap and are never cut off.

    Args:
        heads: heads of the columns.
        right: heads of the columns that are aligned to the right and never wrap.
        title: above the table.
    """
    layout: dict[str, Any] = {"box": box.SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0)}
    table = Table(title=title, title_justify="left", **layout)
    for head in heads:
        if head in right:
            table.add_column(head, justify="right", no_wrap=True)
        else:
            table.add_column(head, overflow="fold")
    return table


def print_paragraph(console: Console, text: str, indent: str = "", hanging: int = 0) -> None:
    """Plain text, wrapped between words at the width of the terminal.

    Args:
        console: where.
        text: one paragraph.
        indent: the beginning of the first line; the others are indented as far.
        hanging: further columns by which all lines but the first are indented.
    """
    lines = textwrap.wrap(
        text,
        width=console.width,
        initial_indent=indent,
        subsequent_indent=" " * (len(indent) + hanging),
        break_long_words=False,
        break_on_hyphens=False,
    )
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def print_figures(console: Console, heads: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
    """Rows of a label and figures; a label that is too long stands on a line of its own.

    Args:
        console: where.
        heads: of the columns.
        rows: as many cells as ``heads``; the first is the label.
    """
    lines = [[Text(head, style="bold") for head in heads], *rows]
    widths = [max(line[i].cell_len for line in lines) for i in range(1, len(heads))]
    space = console.width - sum(widths) - 2 * len(widths)
    longest = max(line[0].cell_len for line in lines)
    label_width = longest if longest <= space else max(min(space, _LABEL_WIDTH), 0)
    for label, *figures in lines:
        line = Text(" " * label_width)
        if label.cell_len <= label_width:
            line = label + Text(" " * (label_width - label.cell_len))
        else:
            console.print(label, soft_wrap=True)
        for figure, width in zip(figures, widths, strict=True):
            line += Text(" " * (2 + width - figure.cell_len)) + figure
        console.print(line, soft_wrap=True)


@contextmanager
def without_sglang_warnings() -> Iterator[None]:
    """Hide the Python warnings that SGLang's modules issue when they are imported.

    On a CPU, for example, its AWQ and GGUF modules warn that they need a GPU. Warnings of every
    other module are still shown.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"sglang(\.|$)")
        yield
