"""How sure a figure is: 95% intervals of the bootstrap, the same each time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["FEWEST_DOCUMENTS", "mean_interval", "ratio_interval"]

#: Of fewer documents than these, what lies within them is resampled in place of them.
FEWEST_DOCUMENTS = 4
_RESAMPLES = 2000
_QUANTILES = (0.025, 0.975)


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """Of the mean of ``values [n]``, which are resampled one by one."""
    return ratio_interval([values], [np.ones_like(values)])


def ratio_interval(
    numerators: Sequence[np.ndarray], denominators: Sequence[np.ndarray]
) -> tuple[float, float]:
    """Of one sum over another, both over the same things: they are drawn in pairs.

    Args:
        numerators: for each document ``[n]``, what is drawn as one: a token or an item.
        denominators: the same shapes.

    Returns:
        Low and high. Documents are resampled where there are :data:`FEWEST_DOCUMENTS`; else what
        lies within each, which says nothing of how documents differ.
    """
    if len(numerators) >= FEWEST_DOCUMENTS:
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
