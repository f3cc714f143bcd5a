"""``hisparse trace``: replay what a model selects through other buffers; convert prefix traces."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hisparse.cli.terminal import (
    add_command,
    add_flag,
    file,
    make_table,
    model,
    number,
    numbers,
    print_paragraph,
    print_result,
)
from hisparse.doctor import provenance
from hisparse.eval import models
from hisparse.trace.prefix import convert_sglang, write_prefix
from hisparse.trace.replay import USUAL_BUFFERS, replay_trace
from hisparse.units import format_bytes


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    text = "replay which pages a model selects through other buffers; convert traces of prefixes"
    parser = add_command(commands, "trace", text)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    text = "what a trace holds, and the hits and bytes of buffers of other sizes"
    replay = add_command(actions, "replay", text, _replay)
    shown = ",".join(map(str, USUAL_BUFFERS))
    text = f"tokens of a row's buffer ({shown}, but those that a selection does not fit)"
    add_flag(replay, "--device-buffer-size", numbers, text)
    text = "a prefix trace of what SGLang wrote with --export-metrics-to-file"
    convert = add_command(actions, "convert", text, _convert, json=False)
    add_flag(convert, "--out", file, "the trace", required=True)
    add_flag(convert, "--model", model, "its tokenizer reads requests that came as text")
    add_flag(convert, "--block-size", number, "tokens", 64)
    for each, text in ((replay, "traces"), (convert, "SGLang's files")):
        each.add_argument("files", nargs="+", type=Path, metavar="FILE", help=text)


def _convert(arguments: argparse.Namespace) -> int:
    tokenize = None
    if arguments.model is not None:
        from transformers import AutoTokenizer

        tokenize = models.load(AutoTokenizer, models.resolve(arguments.model)).encode
    write_prefix(arguments.out, convert_sglang(arguments.files, arguments.block_size, tokenize))
    print(arguments.out)
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    found = [replay_trace(x, arguments.device_buffer_size) for x in arguments.files]
    result = {"command": "trace replay", **provenance.origin(), "traces": found}
    print_result(arguments, result, lambda console: _print_selections(console, found))
    return 0


def _print_selections(console: Console, found: Sequence[dict[str, Any]]) -> None:
    for about in found:
        low, high = about["context"]
        lines = {
            **({"note": about["note"]} if about["note"] else {}),
            "selected by": f"{about['algorithm']}, per {about['scope']}, pages of "
            f"{about['page_size']} tokens, {about['layers']} layers of {about['heads']} rows",
            "steps": f"{about['request_steps']:,}, one for each request in each decode step, of "
            f"{about['requests']:,} requests; contexts of {low:,} to {high:,} tokens",
            "pages": f"{about['selected_pages']:,} selected, {about['bytes_per_page']:.2f} bytes "
            f"each ({format_bytes(about['bytes'])})",
            "overlap": "no two steps in a row"
            if about["adjacent_overlap"] is None
            else f"{about['adjacent_overlap']:.1%} of a selection was in that of the step before",
            "ended": about["ended"]
            + (f", {about['dropped_steps']:,} steps dropped" if about["dropped_steps"] else ""),
        }
        console.print(f"[bold]{about['file']}[/bold]", soft_wrap=True)
        for name, text in lines.items():
            print_paragraph(console, f"{name:12}{text}", hanging=12)
        figures, result = ("buffer", "hits", "read a step"), about["policies"]["lru"]
        table = make_table(*figures, right=figures)
        columns = (about["buffers"], result["hit_ratio"], result["bytes_per_step"])
        for tokens, hits, read in zip(*columns, strict=True):
            table.add_row(f"{tokens:,}", f"{hits:.1%}", format_bytes(round(read)))
        console.print(table)
    print_paragraph(
        console,
        "buffer: tokens of each row in each layer. hits: share of the selected pages that were in "
        "it. read a step: bytes from host memory for each decode step of a request.",
    )
