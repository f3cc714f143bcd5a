"""``hisparse plan``: how many long requests fit, the command to start, and an estimate of time."""

import argparse
import functools
import logging
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from hisparse.cli.terminal import (
    add_command,
    add_flag,
    make_table,
    model,
    names,
    number,
    numbers,
    print_paragraph,
    print_result,
    ratios,
    require,
    string,
)
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
    parser = add_command(commands, "plan", text, _run)
    add = functools.partial(add_flag, parser)
    add("--model", model, "the model; only its configuration is read", "smollm2-135m")
    text = "tokens of a request, prompt and answer (the longest that the model supports)"
    add("--context", numbers, text, [])
    add("--algorithm", names, "algorithms, by name", [])
    add("--budget", numbers, "tokens attended per step", [])
    text = "a whole --hisparse-config, as JSON or @FILE; may be given more than once"
    add("--config", string, text, [], action="append", metavar="JSON")
    add("--device-memory", string, "memory of one GPU, such as 141GiB (this GPU's)", metavar="SIZE")
    add("--host-memory", string, "free host memory, such as 1TiB (free here)", metavar="SIZE")
    text = "size of the weights (computed from the configuration)"
    add("--weights", string, text, metavar="SIZE")
    add("--tp", number, "GPUs that divide a layer, on one node", 1)
    add("--gpu", string, f"GPU of the time estimate: {', '.join(GPUS)}", "h100")
    add("--batch", numbers, "requests that run at once, in the estimate", [1, 8])
    text = "fractions of the selected pages that are on the device"
    add("--hit-ratio", ratios, text, [0.85, 0.95, 1.0])


def _run(arguments: argparse.Namespace) -> int:
    from hisparse.eval.models import resolve

    if arguments.gpu not in GPUS:
        raise ConfigError(f"--gpu: got {arguments.gpu!r}, expected {', '.join(GPUS)}")
    require("transformers", "hisparse plan", "transformers")
    import transformers

    folder = resolve(arguments.model)
    # An error in the model's configuration is one line of ours, without warnings before it.
    transformers.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    from hisparse.model_config import read_model_config

    plan, machine = rows.make_plan(arguments, read_model_config(folder), folder)

    def show(console: Console) -> None:
        _print(console, plan["plans"], machine)
        _print_estimates(console, plan["plans"], plan["estimate"])
        _print_commands(console, plan["plans"])

    print_result(arguments, {"model": arguments.model} | plan, show)
    return 0


def _print(console: Console, found: list[dict[str, Any]], machine: Machine) -> None:
    """How many requests fit, and notes; a row without a request has its reason in a note."""
    figures = ("budget", "context", "dense", "hisparse", "device", "host")
    table = make_table("algorithm", *figures, "limit", right=figures)
    notes: list[str] = []
    for row in found:
        ours = row["hisparse"]
        settings = (row["algorithm"], f"{row['budget']:,}", f"{row['context']:,}")
        dense, limit = f"{row['dense']['max_requests']:,}", ours["limit"].split("_")[0]
        if ours["message"]:
            if ours["message"] not in notes:
                notes.append(ours["message"])
            limit = f"{limit} [{notes.index(ours['message']) + 1}]"
        sizes = (ours["device_bytes_per_request"], ours["host_bytes_per_request"])
        count = f"{ours['max_requests']:,}"
        table.add_row(*settings, dense, count, *map(format_bytes, sizes), Text(limit))
    console.print(table)
    for mark, note in enumerate(notes, 1):
        print_paragraph(console, note, indent=f"[{mark}] ")
    if notes:
        console.print()
    print_paragraph(console, rows.explain(found, machine))
    console.print()


def _print_estimates(
    console: Console, found: list[dict[str, Any]], about: Mapping[str, Any]
) -> None:
    figures = ("budget", "context", "batch", "hits", "dense", "hisparse")
    title = f"Estimated, not measured: ms per token, {about['gpu']}"
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
    for line in about["assumptions"]:
        print_paragraph(console, line, indent="- ")


def _print_commands(console: Console, found: list[dict[str, Any]]) -> None:
    for row in found:
        if row["command"]:
            title = f"{row['algorithm']}, budget {row['budget']:,}, context {row['context']:,}:"
            console.print(f"\n{title}", markup=False)
            # One line, however long, so that it can be copied.
            console.print(row["command"], markup=False, soft_wrap=True)
