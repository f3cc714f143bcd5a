"""``hisparse plan``: how many long requests fit, the command to start, and an estimate of time."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.text import Text

from hisparse.cli.arguments import names, numbers, ratios
from hisparse.cli.output import make_table, print_paragraph
from hisparse.config import find_format
from hisparse.errors import ConfigError
from hisparse.plan import rows
from hisparse.plan.estimate import GPUS
from hisparse.plan.fit import Machine
from hisparse.units import format_bytes


def add_parser(commands: Any) -> None:
    """Add the command to the ``hisparse`` parser."""
    text = (
        "compute how many requests fit, dense and with hisparse, and the command to start; "
        "estimate the time per token"
    )
    parser = commands.add_parser("plan", help=text, description=text)
    add = parser.add_argument
    add(
        "--model",
        default="smollm2-135m",
        metavar="PATH|HUB_ID|NAME",
        help="the model; only its configuration is read (smollm2-135m)",
    )
    add(
        "--context",
        type=numbers,
        default=[],
        metavar="N[,N]",
        help="tokens of a request, prompt and answer (the longest that the model supports)",
    )
    add("--algorithm", type=names, default=[], metavar="NAME[,NAME]", help="algorithms, by name")
    add("--budget", type=numbers, default=[], metavar="N[,N]", help="tokens attended per step")
    add(
        "--config",
        action="append",
        default=[],
        metavar="JSON",
        help="a whole --hisparse-config, as JSON or @FILE; may be given more than once",
    )
    add("--device-memory", metavar="SIZE", help="memory of one GPU, such as 141GiB (this GPU's)")
    add("--host-memory", metavar="SIZE", help="free host memory, such as 1TiB (free here)")
    add("--weights", metavar="SIZE", help="size of the weights (computed from the configuration)")
    add("--kv-cache-dtype", type=_kv_dtype, metavar="NAME", help="how K and V are stored (auto)")
    add("--tp", type=int, default=1, metavar="N", help="GPUs that divide a layer, on one node (1)")
    add(
        "--pp", type=int, default=1, metavar="N", help="parts that divide the layers, each --tp (1)"
    )
    add("--dp", type=int, default=1, metavar="N", help="replicas, all on that node (1)")
    gpus = ", ".join(GPUS)
    add("--gpu", default="h100", metavar="NAME", help=f"GPU of the time estimate: {gpus} (h100)")
    text = "requests that run at once, in the estimate (1,8)"
    add("--batch", type=numbers, default=[1, 8], metavar="N[,N]", help=text)
    text = "fractions of the selected pages that are on the device (0.85,0.95,1)"
    add("--hit-ratio", type=ratios, default=[0.85, 0.95, 1.0], metavar="F[,F]", help=text)
    add("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=_run)


def _kv_dtype(name: str) -> str:
    try:
        find_format(name)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


def _run(arguments: argparse.Namespace) -> int:
    from hisparse.eval.models import resolve

    if arguments.gpu not in GPUS:
        raise ConfigError(f"--gpu: got {arguments.gpu!r}, expected {', '.join(GPUS)}")
    folder = resolve(arguments.model, progress=lambda line: print(line, file=sys.stderr))
    try:
        import transformers
    except ImportError:
        raise ConfigError("hisparse plan needs transformers: pip install transformers") from None
    # An error in the model's configuration is one line of ours, without warnings before it.
    transformers.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    from hisparse.transformers.model_shape import read_model_config

    model = read_model_config(folder)
    asked = rows.Asked(
        **{field.name: getattr(arguments, field.name) for field in fields(rows.Asked)}
    )
    found, machine = rows.make_rows(asked, model, folder)
    assumptions = rows.assumptions(machine)
    if arguments.json:
        estimate = {"measured": False, "gpu": arguments.gpu, "assumptions": assumptions}
        about = {"model": arguments.model} | rows.about(asked, machine) | {"estimate": estimate}
        first = next(row for row in found if row["hisparse"]["limit"] is not None)
        print(json.dumps(about | first | {"plans": found}, indent=2))
        return 0
    console = Console(highlight=False)
    _print(console, found, machine)
    _print_estimates(console, found, arguments.gpu, assumptions)
    _print_commands(console, found)
    return 0


def _print(console: Console, found: list[dict[str, Any]], machine: Machine) -> None:
    """How many requests fit, and notes; a row without a request has its reason in a note."""
    figures = ("budget", "context", "dense", "hisparse", "device", "host")
    table = make_table("algorithm", *figures, "limit", right=figures)
    notes: list[str] = []
    for row in found:
        ours = row["hisparse"]
        settings = (row["algorithm"], f"{row['budget']:,}", f"{row['context']:,}")
        dense, limit = f"{row['dense']['max_requests']:,}", (ours["limit"] or "").split("_")[0]
        if ours["message"]:
            if ours["message"] not in notes:
                notes.append(ours["message"])
            limit = f"{limit} [{notes.index(ours['message']) + 1}]".strip()
        if ours["limit"] is None:
            table.add_row(*settings, dense, "-", "-", "-", Text(limit))
            continue
        sizes = (ours["device_bytes_per_request"], ours["host_bytes_per_request"])
        count = f"{ours['max_requests']:,}"
        table.add_row(*settings, dense, count, *map(format_bytes, sizes), Text(limit))
    console.print(table)
    for number, note in enumerate(notes, 1):
        print_paragraph(console, note, indent=f"[{number}] ")
    if notes:
        console.print()
    print_paragraph(console, rows.explain(found, machine))
    console.print()


def _print_estimates(
    console: Console, found: list[dict[str, Any]], gpu: str, assumptions: Sequence[str]
) -> None:
    figures = ("budget", "context", "batch", "hits", "dense", "hisparse")
    title = f"Estimated, not measured: ms per token, {gpu}"
    table = make_table("algorithm", *figures, right=figures, title=title)
    for row in found:
        for step in row["estimates"]:
            table.add_row(
                row["algorithm"],
                f"{row['budget']:,}",
                f"{row['context']:,}",
                f"{step['batch']:,}",
                f"{step['hit_ratio']:.0%}",
                f"{step['dense_ms_per_token']:,.1f}",
                f"{step['hisparse_ms_per_token']:,.1f}",
            )
    console.print(table)
    console.print("Assumed:")
    for line in assumptions:
        print_paragraph(console, line, indent="- ")


def _print_commands(console: Console, found: list[dict[str, Any]]) -> None:
    for row in found:
        if row["command"]:
            title = f"{row['algorithm']}, budget {row['budget']:,}, context {row['context']:,}:"
            console.print(f"\n{title}", markup=False)
            # One line, however long, so that it can be copied.
            console.print(row["command"], markup=False, soft_wrap=True)
