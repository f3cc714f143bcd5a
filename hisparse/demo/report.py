"""The demo's table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hisparse.demo.compare import Measured, sides
from hisparse.demo.document import HARBOUR
from hisparse.units import format_bytes

__all__ = ["print_report"]


def print_report(console: Console, dense: Measured, sparse: Measured, *, on_cpu: bool) -> None:
    """Both sides in one table, and what was asked above it."""
    table = Table(title=f"{sparse.answer.prompt_tokens:,} tokens, then: {HARBOUR.question}")
    table.add_column()
    for side in sides():
        table.add_column(side.title)
    for label, *cells in zip(_LABELS, _cells(dense), _cells(sparse), strict=True):
        table.add_row(label, *cells)
    console.print(table)
    if on_cpu:
        console.print(
            "There is no GPU here, so the device's memory is a part of host memory, and reading "
            "over the link is copying within it.",
            style="dim",
        )


_LABELS = (
    "answer",
    "right",
    "time to first token",
    "time per token",
    "room for tokens",
    "KV bytes on the device",
    "summaries and tables there",
    "KV bytes in host memory",
    "hit ratio",
)


def _cells(measured: Measured) -> tuple[Text, ...]:
    answer, ratio = measured.answer, measured.hit_ratio
    found = HARBOUR.is_found_in(answer.text)
    plain = (
        f"{answer.ttft_s:.1f} s",
        f"{1000 * answer.time_per_token_s:.0f} ms",
        f"{measured.kv_tokens:,}",
        format_bytes(measured.device_bytes),
        format_bytes(measured.scoring_bytes) if measured.scoring_bytes else "none",
        format_bytes(measured.host_bytes) if measured.host_bytes else "none",
        "" if ratio is None else f"{ratio:.3f}",
    )
    right = Text("yes" if found else "no", style="green" if found else "red")
    return (Text(answer.text.strip()), right, *map(Text, plain))
