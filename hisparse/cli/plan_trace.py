"""Flag of ``hisparse plan`` that takes hit ratios from a trace of selections."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from hisparse.cli.output import print_paragraph
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.trace import HitCurve, SelectionTrace, lru_curve

__all__ = ["Traced", "add_flag", "print_source", "read_trace"]


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names a trace."""
    text = (
        "take the hit ratio of device_buffer_size from a trace (hisparse trace record), in place "
        "of --hit-ratio"
    )
    parser.add_argument("--trace", metavar="FILE", help=text)


@dataclass(frozen=True, kw_only=True)
class Traced:
    """Hit ratios of buffers of all sizes, and what they were recorded of.

    Attributes:
        curve: hits of an LRU buffer.
        about: what the trace is of, for JSON.
    """

    curve: HitCurve
    about: dict[str, Any]

    def hit_ratio(self, config: HiSparseConfig) -> float:
        """Hits of a row with ``device_buffer_size``, the smallest that a request gets.

        Raises:
            ConfigError: the trace was recorded with other settings.
        """
        about = self.about
        for name in ("algorithm", "page_size", "budget"):
            expected, got = about[name], getattr(config, name)
            # A made-up trace is of no algorithm.
            if expected not in (None, got) and (name == "page_size" or not self.made_up):
                raise ConfigError(
                    f"--trace: got {about['file']!r} of {name} {expected}, but a row of the plan "
                    f"has {name} {got}; expected the same, by --algorithm, --budget or --config"
                )
        return self.curve.hit_ratio(config.min_row_tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest context in the trace."""
        return int(self.about["context"][1])

    @property
    def made_up(self) -> bool:
        """Whether no model has selected these pages."""
        return bool(self.about["source"] == "made up")


def read_trace(arguments: argparse.Namespace) -> Traced | None:
    """The trace that was named; None without one.

    Raises:
        ConfigError: the file is no trace, or ``--hit-ratio`` is given too.
    """
    if arguments.trace is None:
        return None
    if arguments.hit_ratio is not None:
        raise ConfigError(f"--trace: got {arguments.trace!r} and --hit-ratio, expected one of them")
    with SelectionTrace(Path(arguments.trace)) as trace:
        header, lengths = trace.header, trace.visits.seq_lens
        about = {
            "file": arguments.trace,
            "source": header.source,
            "note": header.note,
            "algorithm": header.algorithm,
            "budget": header.settings.get("budget"),
            "page_size": header.page_size,
            "context": [int(lengths.min()), int(lengths.max())],
        }
        return Traced(curve=lru_curve(trace), about=about)


def print_source(console: Console, traced: Traced, rows: Sequence[dict[str, Any]]) -> None:
    """One paragraph on where the hit ratios come from."""
    about = traced.about
    low, high = about["context"]
    source = "MADE UP, by no model" if traced.made_up else "recorded"
    note = f": {about['note']}" if about["note"] else ""
    print_paragraph(
        console,
        f"hits: of an LRU buffer of device_buffer_size tokens in {about['file']} ({source}{note}), "
        f"with contexts of {low:,} to {high:,} tokens. Other contexts may have other hit ratios.",
    )
    beyond = sorted({row["context"] for row in rows if row["beyond_trace"]})
    if beyond:
        print_paragraph(
            console,
            f"?: {', '.join(f'{x:,}' for x in beyond)} tokens of context are more than any in the "
            "trace. A buffer of the same size holds a smaller part of them, so expect fewer hits.",
        )
    console.print()
