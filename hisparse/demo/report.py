"""The demo's table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hisparse.demo.compare import Measurement, server_setups
from hisparse.demo.document import HARBOUR
from hisparse.units import format_bytes


def print_report(
    console: Console, dense: Measurement, sparse: Measurement, *, on_cpu: bool
) -> None:
    """Print a table with a column for each server."""
    table = Table(title=f"{sparse.answer.prompt_tokens:,} tokens, then: {HARBOUR.question}")
    table.add_column()
    for setup in server_setups():
        table.add_column(setup.title)
    for label, *cells in zip(_LABELS, _cells(dense), _cells(sparse), strict=True):
        table.add_row(label, *cells)
    console.print(table)
    if on_cpu:
        console.print(
            "This machine has no GPU: device memory is a part of host memory, and transfers are "
            "copies within it.",
            style="dim",
        )


_LABELS = (
    "answer",
    "correct",
    "time to first token",
    "time per token",
    "KV capacity, tokens",
    "device memory for KV",
    "summaries and tables",
    "host memory for KV",
    "hit ratio",
)


def _cells(measurement: Measurement) -> tuple[Text, ...]:
    answer, ratio = measurement.answer, measurement.hit_ratio
    is_correct = HARBOUR.is_found_in(answer.text)
    plain = (
        f"{answer.ttft_s:.1f} s",
        f"{1000 * answer.time_per_token_s:.0f} ms",
        f"{measurement.kv_tokens:,}",
        format_bytes(measurement.device_bytes),
        format_bytes(measurement.scoring_bytes) if measurement.scoring_bytes else "none",
        format_bytes(measurement.host_bytes) if measurement.host_bytes else "none",
        "" if ratio is None else f"{ratio:.3f}",
    )
    correct = Text("yes" if is_correct else "no", style="green" if is_correct else "red")
    return (Text(answer.text.strip()), correct, *map(Text, plain))
