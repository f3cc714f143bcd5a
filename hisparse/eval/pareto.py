"""What a summary shows, in words that follow from its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hisparse.eval.method import DENSE
from hisparse.eval.tables import number

__all__ = ["pareto_lines"]

_COSTS = ("kl", "kept_mean", "bytes_per_token")


def pareto_lines(summary: Sequence[dict[str, Any]]) -> list[str]:
    """For each context and budget: the methods that are on the front of what they cost.

    No other is at most as high in divergence, tokens kept and bytes, by their means, and lower in
    one. ``oracle``, the ceiling, is left out, and so is a group without at least two others.
    """
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for line in summary:
        if line["method"] != DENSE and line["algorithm"] != "oracle" and line["kept_mean"]:
            groups.setdefault((line["context"], line["budget"]), []).append(line)
    found = []
    for (context, budget), lines in groups.items():
        best = [x for x in lines if not any(_beats(other, x) for other in lines)]
        if len(lines) < 2:
            continue
        shown = "; ".join(
            f"{x['method']} ({number(x['kl'])} nats, {number(x['kept_mean'])} tokens, "
            f"{number(x['bytes_per_token'])} bytes)"
            for x in sorted(best, key=lambda x: float(x["kl"]))
        )
        found.append(
            f"Budget {budget} of {context}: of {len(lines)} methods besides the oracle, no other "
            "equals or beats these in divergence, tokens kept and bytes a token all at once: "
            f"{shown}."
        )
    return found


def _beats(a: dict[str, Any], b: dict[str, Any]) -> bool:
    costs = [(a[name], b[name]) for name in _COSTS]
    return all(x <= y for x, y in costs) and any(x < y for x, y in costs)
