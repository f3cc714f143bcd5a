"""KL divergence and perplexity from records, and their bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hisparse.eval.documents import CONTINUE

#: With fewer documents than this, the tokens or items within each document are resampled instead.
MIN_DOCUMENTS = 4
_RESAMPLES = 2000
_QUANTILES = (0.025, 0.975)


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """The interval of the mean of ``values [n]``, resampled one by one."""
    return ratio_interval([values], [np.ones_like(values)])


def ratio_interval(
    numerators: Sequence[np.ndarray], denominators: Sequence[np.ndarray]
) -> tuple[float, float]:
    """The interval of one sum over another, resampled in pairs.

    Args:
        numerators: ``[n]`` for each document; an entry is a token or an item.
        denominators: the same shapes.

    Returns:
        Low and high. Whole documents are resampled if there are at least :data:`MIN_DOCUMENTS`;
        otherwise the entries within each document, so that the interval leaves out how much
        documents differ.
    """
    if len(numerators) >= MIN_DOCUMENTS:
        numerators = [np.array([part.sum() for part in numerators])]
        denominators = [np.array([part.sum() for part in denominators])]
    rng = np.random.default_rng(0)
    above, below = np.zeros(_RESAMPLES), np.zeros(_RESAMPLES)
    for numerator, denominator in zip(numerators, denominators, strict=True):
        drawn = rng.integers(len(numerator), size=(_RESAMPLES, len(numerator)))
        above += numerator[drawn].sum(1)
        below += denominator[drawn].sum(1)
    low, high = np.quantile(above / below, _QUANTILES)
    return float(low), float(high)


#: A line of ``records.jsonl``: one method on one document.
Record = dict[str, Any]
#: A value and its 95% interval, low and high.
Estimate = tuple[float, tuple[float, float]]


def kl(records: Sequence[Record]) -> Estimate:
    """Mean KL divergence from the dense next-token distribution, nats per token."""
    parts = [np.array(r["kl"]) for r in records]
    return _ratio(parts, [np.ones_like(part) for part in parts])


def _ratio(numerators: Sequence[np.ndarray], denominators: Sequence[np.ndarray]) -> Estimate:
    above, below = (sum(float(part.sum()) for part in x) for x in (numerators, denominators))
    return above / below, ratio_interval(numerators, denominators)


def perplexities(
    name: str, group: Sequence[Record], dense: dict[str, Record], task: str
) -> dict[str, Estimate | None]:
    """``name``: perplexity of a task's tokens. ``name_ratio``: that over the dense model's.

    Both are None if no document has the task.
    """
    pairs = [(_log_probs(r, task), _log_probs(dense[r["document"]], task)) for r in group]
    own, reference = [a for a, _ in pairs if len(a)], [b for a, b in pairs if len(a)]
    if not own:
        return {name: None, f"{name}_ratio": None}
    counts = [part[:, 1] for part in own]
    losses = [-part[:, 0] for part in own]
    more = [b[:, 0] - a[:, 0] for a, b in zip(own, reference, strict=True)]
    return {name: _exp(_ratio(losses, counts)), f"{name}_ratio": _exp(_ratio(more, counts))}


def _log_probs(record: Record, task: str) -> np.ndarray:
    """``[n, 2]``, sum and count of log-probabilities in each unit that is resampled: a token of the
    following text, or a whole passage.
    """
    items = [x["log_probs"] for x in record["items"] if x["task"] == task]
    if task == CONTINUE:
        items = [[token] for item in items for token in item]
    return np.array([(sum(item), len(item)) for item in items]).reshape(-1, 2)


def _exp(estimate: Estimate) -> Estimate:
    mean, (low, high) = estimate
    return math.exp(mean), (math.exp(low), math.exp(high))
