"""Flags and output of ``hisparse plan`` for the most requests within a time per token."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from hisparse.cli.output import make_table, print_paragraph
from hisparse.errors import ConfigError
from hisparse.plan.estimate import is_resident
from hisparse.plan.fit import Capacity, Machine
from hisparse.plan.hardware import Hardware
from hisparse.plan.tpot import Load, Loads, loads_within, rest_of_step
from hisparse.units import parse_seconds

__all__ = ["Target", "add_flags", "describe_loads", "print_loads", "read_target"]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say within which time a token has to come."""
    text = "time per output token, such as 30ms: print the most requests that keep to it"
    parser.add_argument("--slo-tpot", metavar="TIME", help=text)
    text = (
        "time of a step without attention, such as 9ms: measure it as the time per token of a "
        "dense server with one short request (the time to read all weights once)"
    )
    parser.add_argument("--rest", metavar="TIME", help=text)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A time per token, and what a step takes besides attention.

    Attributes:
        token_ms: the most time per token.
        rest_ms: time of a step without attention, by the name of the GPU.
        assumption: where ``rest_ms`` comes from.
    """

    token_ms: float
    rest_ms: Mapping[str, float]
    assumption: str


def read_target(
    arguments: argparse.Namespace, every: Mapping[str, Hardware], machine: Machine
) -> Target | None:
    """What the flags ask for; None without ``--slo-tpot``.

    Raises:
        ConfigError: a time cannot be read, or ``--rest`` has nothing that it can apply to.
    """
    if arguments.slo_tpot is None:
        if arguments.rest is not None:
            raise ConfigError(f"--rest: got {arguments.rest} without --slo-tpot, expected both")
        return None
    token_ms = 1000 * parse_seconds("--slo-tpot", arguments.slo_tpot)
    if arguments.rest is not None and len(every) > 1:
        raise ConfigError(
            f"--rest: got one time for {len(every)} GPUs ({', '.join(every)}), expected one --gpu"
        )
    rank_bytes = -(-machine.weight_bytes // machine.tp)
    rest, assumption = {}, ""
    for gpu, hardware in every.items():
        rest[gpu], assumption = rest_of_step(arguments.rest, hardware, lambda: rank_bytes)
    return Target(token_ms=token_ms, rest_ms=rest, assumption=assumption)


def describe_loads(
    capacity: Capacity,
    every: Mapping[str, Hardware],
    target: Target | None,
    hit_ratios: Sequence[float],
) -> list[dict[str, Any]]:
    """The most requests for each GPU and hit ratio, for JSON; none if the settings are refused."""
    if target is None or capacity.limit is None:
        return []
    resident = is_resident(capacity.config, capacity.spec, capacity.context)
    found = []
    for gpu, hardware in every.items():
        for hits in [1.0] if resident else hit_ratios:
            loads = loads_within(
                capacity,
                hardware,
                limit_ms=target.token_ms,
                rest_ms=target.rest_ms[gpu],
                hit_ratio=hits,
            )
            found.append(_describe(gpu, target, loads))
    return found


def _describe(gpu: str, target: Target, loads: Loads) -> dict[str, Any]:
    def side(load: Load) -> dict[str, Any]:
        return {
            "max_requests": load.requests,
            "ms_per_token": None if load.token_ms is None else float(f"{load.token_ms:.4g}"),
            "tokens_per_s": float(f"{load.tokens_per_s:.4g}"),
            "limit": load.limit,
        }

    return {
        "gpu": gpu,
        "hit_ratio": loads.hit_ratio,
        "slo_ms": target.token_ms,
        "rest_ms": float(f"{target.rest_ms[gpu]:.4g}"),
        "dense": side(loads.dense),
        "hisparse": side(loads.hisparse),
    }


def print_loads(console: Console, rows: Sequence[dict[str, Any]], target: Target) -> None:
    """A table for each GPU, then what the time of the rest stands on."""
    settings = ("budget", "context", "hits")
    figures = ("dense", "ms", "limit", "ours", "ms ", "limit ")
    for gpu, rest_ms in target.rest_ms.items():
        title = f"Estimated, not measured: requests within {target.token_ms:g} ms per token, {gpu}"
        right = (*settings, *figures)
        table = make_table("algorithm", *settings, *figures, right=right, title=title)
        for row in rows:
            for load in row["loads"]:
                if load["gpu"] == gpu:
                    hits = f"{load['hit_ratio']:.0%}{'?' * row['beyond_trace']}"
                    start = f"{row['budget']:,}", f"{row['context']:,}", hits
                    sides = (*_cells(load["dense"]), *_cells(load["hisparse"]))
                    table.add_row(row["algorithm"], *start, *sides)
        console.print(table)
        print_paragraph(console, f"The rest of the model takes {rest_ms:.3g} ms of each step.")
        console.print()
    print_paragraph(
        console,
        "dense, ours: requests at once. ms: time per token with so many, or with one if that is "
        "too slow. limit: what excludes one more, the time or the memory. " + target.assumption,
    )
    console.print()


def _cells(side: dict[str, Any]) -> tuple[str, str, str]:
    ms = side["ms_per_token"]
    return f"{side['max_requests']:,}", "-" if ms is None else f"{ms:,.1f}", side["limit"]
