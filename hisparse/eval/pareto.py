"""The methods on the Pareto front of their costs, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hisparse.eval.method import DENSE
from hisparse.eval.tables import number

_COSTS = ("kl", "kept_mean", "bytes_per_token")


def pareto_lines(summary: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each context and budget: its methods that no other method dominates.

    A method dominates another if its mean divergence, tokens kept and bytes per token are at most
    as high and one of them is lower. ``oracle``, the ceiling, is left out, and so is a context and
    budget with fewer than two other methods.
    """
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for line in summary:
        if line["method"] != DENSE and line["algorithm"] != "oracle" and line["kept_mean"]:
            groups.setdefault((line["context"], line["budget"]), []).append(line)
    found = []
    for (context, budget), lines in groups.items():
        if len(lines) < 2:
            continue
        best = [x for x in lines if not any(_dominates(other, x) for other in lines)]
        shown = "; ".join(
            f"{x['method']} ({number(x['kl'])} nats, {number(x['kept_mean'])} tokens, "
            f"{number(x['bytes_per_token'])} bytes)"
            for x in sorted(best, key=lambda x: float(x["kl"]))
        )
        found.append(
            f"Budget {budget} of {context}: Pareto front of KL divergence, tokens kept and bytes "
            f"per token, among {len(lines)} methods without the oracle: {shown}."
        )
    return found


def _dominates(a: dict[str, Any], b: dict[str, Any]) -> bool:
    costs = [(a[name], b[name]) for name in _COSTS]
    return all(x <= y for x, y in costs) and any(x < y for x, y in costs)
