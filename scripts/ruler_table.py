"""Tables of RULER for bench/results/README.md, from one result.

``python -m scripts.ruler_table RESULT.json`` prints what ``hisparse eval --ruler --json`` found:
each method's mean over the tasks that the dense model can do, in pairs with the dense model's and
with that of ``sketch`` at the same budget, and its score in each task. Percent, with 95% intervals.
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


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _interval(value: float, low: float, high: float, digits: int = 0) -> str:
    value, low, high = (round(100 * x, digits) + 0.0 for x in (value, low, high))
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _less(ours: dict[str, Any] | None, other: dict[str, Any]) -> str:
    """The score of ``sketch`` less that of another method, in pairs."""
    if ours is None or ours is other:
        return "-"
    more = np.array(ours["scores"]) - np.array(other["scores"])
    return _interval(float(more.mean()), *mean_interval(more), digits=1)


def lines(result: dict[str, Any]) -> Iterator[str]:
    """The lines of both tables."""
    means = [cell for cell in result["cells"] if cell["task"] == MEAN]
    ours = {cell["budget"]: cell for cell in means if cell["method"] == OURS}
    yield _row(["method", "budget", "tokens", "bytes", "score", "lost", f"`{OURS}` less it"])
    yield "|---" * 7 + "|"
    for cell in sorted(means, key=lambda cell: (cell["budget"] or 0, -cell["score"])):
        dense = cell["method"] == DENSE
        yield _row(
            [
                f"`{cell['method']}`",
                "-" if dense else cell["budget"],
                "-" if dense else round(cell["kept_mean"]),
                round(cell["bytes_per_token"]),
                _interval(cell["score"], cell["low"], cell["high"]),
                _interval(cell["lost"], cell["lost_low"], cell["lost_high"], digits=1),
                _less(None if dense else ours.get(cell["budget"]), cell),
            ]
        )
    columns = {(c["method"], c["budget"]): c for c in means}
    yield ""
    yield _row(["task", "n", *(f"`{name}` {budget or ''}".strip() for name, budget in columns)])
    yield "|---" * (2 + len(columns)) + "|"
    for task in dict.fromkeys(cell["task"] for cell in result["cells"]):
        row = {(c["method"], c["budget"]): c for c in result["cells"] if c["task"] == task}
        texts = [
            f"{100 * row[key]['score']:.0f}" if row[key]["usable"] else f"[{row[key]['score']:.0%}]"
            for key in columns
        ]
        yield _row([task, next(iter(row.values()))["n"], *texts])


if __name__ == "__main__":
    print("\n".join(lines(json.loads(Path(sys.argv[1]).read_text()))))
