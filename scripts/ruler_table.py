"""The tables of RULER in docs/quality.md and bench/results/README.md, from one result.

``python -m scripts.ruler_table RESULT.json [BUDGET]`` prints what ``hisparse eval --ruler --json``
found: each method's mean over the tasks that the dense model can do, compared in pairs of prompts
with the dense model and with ``sketch`` at the same budget; the scores of each task; and a row for
each method with what it loses at each budget. Percent, with 95% intervals.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hisparse.eval.divergence import mean_interval
from hisparse.eval.method import DENSE
from hisparse.eval.results import MEAN

#: The method that the others are compared with.
OURS = "sketch"


def _table(rows: Sequence[Sequence[object]]) -> Iterator[str]:
    for number, row in enumerate(rows):
        yield f"| {' | '.join(map(str, row))} |"
        if not number:
            yield "|---" * len(row) + "|"


def _interval(value: float, low: float, high: float, digits: int = 1) -> str:
    # Adding zero turns -0.0 into 0.0.
    value, low, high = (round(100 * x, digits) + 0.0 for x in (value, low, high))
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _more(ours: dict[str, Any] | None, other: dict[str, Any]) -> str:
    """The score of ``sketch`` less that of another method."""
    if ours is None or ours is other:
        return "-"
    more = np.array(ours["scores"]) - np.array(other["scores"])
    return _interval(float(more.mean()), *mean_interval(more))


def means(result: dict[str, Any], budget: int | None = None) -> str:
    """A row for each method and budget, best first; ``budget``: of this one only."""
    cells = [cell for cell in result["cells"] if cell["task"] == MEAN]
    cells = [cell for cell in cells if budget in (None, cell["budget"])]
    ours = {cell["budget"]: cell for cell in cells if cell["method"] == OURS}
    rows = [["method", "budget", "tokens", "bytes", "score", "lost", f"`{OURS}` is ahead by"]]
    for cell in sorted(cells, key=lambda cell: (-(cell["budget"] or 1e9), -cell["score"])):
        score = _interval(cell["score"], cell["low"], cell["high"], digits=0)
        lost = _interval(cell["lost"], cell["lost_low"], cell["lost_high"])
        row = [f"{cell['bytes_per_token']:,.0f}", score, lost]
        if cell["method"] == DENSE:
            rows.append([f"`{DENSE}`", "-", "-", *row, "-"])
        else:
            sizes = [str(cell["budget"]), f"{cell['kept_mean']:.0f}"]
            rows.append(
                [f"`{cell['method']}`", *sizes, *row, _more(ours.get(cell["budget"]), cell)]
            )
    return "\n".join(_table(rows))


def tasks(result: dict[str, Any]) -> str:
    """A row for each task; in brackets where the dense model scores too little to rank methods."""
    cells = {(c["method"], c["budget"], c["task"]): c for c in result["cells"]}
    methods = list(dict.fromkeys(key[:2] for key in cells))
    heads = [f"`{name}`" + (f", {budget}" if budget else "") for name, budget in methods]
    rows = [["task", "prompts", "tokens", *heads]]
    for task in dict.fromkeys(key[2] for key in cells):
        group = [cells[(*method, task)] for method in methods]
        low, _, high = group[0]["tokens"]
        form = "{:.0f}" if group[0]["usable"] else "[{:.0f}]"
        scores = [form.format(100 * cell["score"]) for cell in group]
        rows.append([f"`{task}`", str(group[0]["n"]), f"{low:,} to {high:,}", *scores])
    return "\n".join(_table(rows))


def losses(result: dict[str, Any]) -> str:
    """A row for each method: what it loses with each budget, the least with the first budget first.

    Bytes are of representations of pages: "by request" where a method has none.
    """
    cells = [c for c in result["cells"] if c["task"] == MEAN and c["method"] != DENSE]
    budgets = list(dict.fromkeys(cell["budget"] for cell in cells))
    found = {(cell["method"], cell["budget"]): cell for cell in cells}
    rows = [["method", "bytes", *(f"lost, {budget}" for budget in budgets)]]
    for cell in sorted(cells, key=lambda cell: cell["lost"]):
        if cell["budget"] == budgets[0]:
            size = f"{cell['bytes_per_token']:,.0f}" if cell["bytes_per_token"] else "by request"
            row = [f"`{cell['method']}`", size]
            for budget in budgets:
                other = found.get((cell["method"], budget))
                parts = other and (other["lost"], other["lost_low"], other["lost_high"])
                row.append(_interval(*parts) if parts else "-")
            rows.append(row)
    return "\n".join(_table(rows))


if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(means(found, *map(int, sys.argv[2:])), tasks(found), losses(found), sep="\n\n")
