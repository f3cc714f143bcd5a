"""Compare the quality of two commits: print divergences side by side, and fail if one grew.

Run as ``python -m scripts.compare_quality BEFORE.json AFTER.json``. Both files are output of the
same ``hisparse eval ... --json`` on the same machine: rounding differs between processors. A file
may hold more methods, budgets or contexts than the other; what both have is compared.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

from hisparse.options import check_fields, read_object

#: Growth that is rounding: kernels may add in another order, which changes a few close choices.
_ROUNDING = 0.02
_DENSE = "dense"


class _Line(TypedDict):
    method: str
    budget: int | None
    context: int
    kl: float
    ppl: float


class _Result(TypedDict):
    model: str
    dtype: str
    summary: list[_Line]


class Pair(NamedTuple):
    """The divergence of one method, in nats per token, at both commits."""

    method: str
    budget: int
    context: int
    before: float
    after: float

    @property
    def is_worse(self) -> bool:
        """Whether the divergence grew by more than rounding."""
        return self.after > self.before * (1 + _ROUNDING)


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[Pair]:
    """The methods that both results have.

    Raises:
        ValueError: the results are of different models, dtypes or documents, or share no method.
    """
    for name in ("model", "dtype"):
        if before[name] != after[name]:
            raise ValueError(f"{name}: got {before[name]} and {after[name]}, expected the same")
    found = [
        {(x["method"], x["budget"], x["context"]): x for x in result["summary"]}
        for result in (before, after)
    ]
    keys = [key for key in found[0] if key in found[1]]
    for key in keys:
        old, new = (lines[key] for lines in found)
        if key[0] == _DENSE and abs(new["ppl"] / old["ppl"] - 1) > _ROUNDING:
            raise ValueError(
                f"dense attention at {key[2]} tokens: got perplexities {old['ppl']:.4g} and "
                f"{new['ppl']:.4g}, expected the same documents"
            )
    pairs = [
        Pair(*key, found[0][key]["kl"], found[1][key]["kl"]) for key in keys if key[0] != _DENSE
    ]
    if not pairs:
        raise ValueError("the results share no method with the same budget and context")
    return pairs


def _read(file: str) -> dict[str, Any]:
    result = read_object(file, "RESULT", '{"command": "eval", ...}')
    check_fields(repr(file), result, _Result)
    return result


def main(arguments: Sequence[str]) -> int:
    """Print a line for each method; 1 if one is worse, 2 if the files cannot be compared."""
    if len(arguments) != 2:
        print("usage: python -m scripts.compare_quality BEFORE.json AFTER.json", file=sys.stderr)
        return 2
    try:
        pairs = compare(*map(_read, arguments))
    except ValueError as error:
        print(f"compare_quality: error: {error}", file=sys.stderr)
        return 2
    for pair in pairs:
        verdict = "worse" if pair.is_worse else "ok"
        print(
            f"{pair.method}, {pair.budget} of {pair.context}: "
            f"{pair.before:.4f} -> {pair.after:.4f} nats per token, {verdict}"
        )
    return int(any(pair.is_worse for pair in pairs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
