"""Flags and output of ``hisparse plan`` for the estimated time of a decode step."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from hisparse.cli.lists import names, numbers, ratios
from hisparse.cli.output import make_table, print_paragraph
from hisparse.plan.estimate import ASSUMPTIONS, UNKNOWNS, StepEstimate, estimate_step, is_resident
from hisparse.plan.fit import Capacity, Machine
from hisparse.plan.hardware import GPUS, HOSTS, Hardware
from hisparse.plan.tpot import weights_ms

__all__ = [
    "HIT_RATIOS",
    "add_flags",
    "describe_hardware",
    "describe_steps",
    "print_steps",
    "read_hardware",
]

#: Fractions of the selected pages that are on the device, unless others are given.
HIT_RATIOS = (0.85, 0.95, 1.0)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say for what the time of a step is estimated."""
    add = parser.add_argument
    gpus, hosts = ", ".join(GPUS), ", ".join(HOSTS)
    text = f"GPUs to estimate the time of a step for: {gpus} (h100)"
    add("--gpu", type=names, default=["h100"], metavar="NAME[,NAME]", help=text)
    add("--host", default="pcie5", metavar="NAME", help=f"link to the host: {hosts} (pcie5)")
    text = "requests of a step (1,8)"
    add("--batch", type=numbers, default=[1, 8], metavar="N[,N]", help=text)
    text = "fractions of the selected pages that are on the device (0.85,0.95,1)"
    add("--hit-ratio", type=ratios, metavar="F[,F]", help=text)


def read_hardware(arguments: argparse.Namespace) -> dict[str, Hardware]:
    """The GPUs by name, each with its host.

    Raises:
        ConfigError: a GPU or the host is unknown, or a GPU does not go with the host.
    """
    return {gpu: Hardware.named(gpu, arguments.host) for gpu in arguments.gpu or [""]}


def describe_hardware(
    every: dict[str, Hardware], arguments: argparse.Namespace, machine: Machine
) -> dict[str, Any]:
    """What the estimates stand on, for JSON."""
    rank_bytes = -(-machine.weight_bytes // machine.tp)
    return {
        "measured": False,
        "host": arguments.host,
        "assumptions": ASSUMPTIONS,
        "unknowns": UNKNOWNS,
        "gpus": {
            name: {
                "figures": {key: figure._asdict() for key, figure in hardware.figures.items()},
                "weights_ms": _round(weights_ms(rank_bytes, hardware)),
            }
            for name, hardware in every.items()
        },
    }


def describe_steps(
    capacity: Capacity,
    every: dict[str, Hardware],
    batches: Sequence[int],
    hit_ratios: Sequence[float],
) -> list[dict[str, Any]]:
    """Estimates for each GPU, batch and hit ratio; none if the settings are refused.

    There is one hit ratio, 1, if every context is on the device.
    """
    if capacity.limit is None:
        return []
    config, spec, context = capacity.config, capacity.spec, capacity.context
    hits = [1.0] if is_resident(config, spec, context) else hit_ratios

    def step(hardware: Hardware, batch: int, hit: float) -> dict[str, Any]:
        return _describe(
            estimate_step(config, spec, hardware, context=context, batch=batch, hit_ratio=hit)
        )

    return [
        {"gpu": gpu} | step(hardware, batch, hit)
        for gpu, hardware in every.items()
        for batch in batches
        for hit in hits
    ]


def _describe(found: StepEstimate) -> dict[str, Any]:
    return {
        "batch": found.batch,
        "hit_ratio": found.hit_ratio,
        "dense": {"us_per_layer": _round(found.dense_us), "ms_per_token": _round(found.dense_ms)},
        "hisparse": {
            "us_per_layer": _round(found.hisparse_us),
            "ms_per_token": _round(found.hisparse_ms),
            "parts_us": {name: _round(us) for name, us in found.parts_us.items()},
            "launches_per_layer": found.launches,
            "host_bound": found.host_bound,
        },
        "bytes_per_layer": asdict(found.bytes),
        "ratio": _round(found.ratio),
    }


def print_steps(console: Console, rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> None:
    """A table for each GPU, then what it stands on in words."""
    settings = ("budget", "context", "batch", "hits")
    figures = ("dense\nus", "ours\nus", "dense\nms", "ours\nms", "ratio")
    for gpu, facts in about["gpus"].items():
        table = make_table(
            "algorithm",
            *settings,
            *figures,
            right=(*settings, *figures),
            title=f"Estimated, not measured: attention of a step, {gpu} with {about['host']}",
        )
        for row in rows:
            for step in row["estimates"]:
                if step["gpu"] == gpu:
                    table.add_row(*_cells(row, step))
        console.print(table)
        print_paragraph(
            console,
            f"Reading all weights once takes {facts['weights_ms']:.3g} ms besides, dense or not.",
        )
        console.print()
    print_paragraph(
        console,
        "us: attention of a layer. ms: of all layers, for one token of each request. ours: with "
        "hisparse; *: the host's launches take longer than the GPU (cuda_graph is false). hits: "
        "share of the selected pages that are on the device. ratio: dense time over ours. A batch "
        "must fit: see dense and hisparse in the first table.",
    )
    for title, lines in (("Assumed:", about["assumptions"]), ("Unknown:", about["unknowns"])):
        console.print(f"\n{title}")
        for line in lines:
            print_paragraph(console, line, indent="- ")
    console.print("\n--json prints each figure of the GPU and its host, with its source.")


def _cells(row: dict[str, Any], step: dict[str, Any]) -> tuple[str, ...]:
    dense, ours = step["dense"], step["hisparse"]
    return (
        row["algorithm"],
        f"{row['budget']:,}",
        f"{row['context']:,}",
        f"{step['batch']:,}",
        f"{step['hit_ratio']:.0%}{'?' * row['beyond_trace']}",
        f"{dense['us_per_layer']:,.0f}",
        f"{ours['us_per_layer']:,.0f}{'*' * ours['host_bound']}",
        f"{dense['ms_per_token']:,.1f}",
        f"{ours['ms_per_token']:,.1f}",
        f"{step['ratio']:.1f}",
    )


def _round(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")
