"""95% intervals: of means and ratios by bootstrap from a fixed seed, and of shares."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

#: With fewer documents than this, the tokens or items within each document are resampled instead.
MIN_DOCUMENTS = 4
_RESAMPLES = 2000
_QUANTILES = (0.025, 0.975)
_Z95 = 1.96


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


def wilson_interval(correct: float, asked: int) -> tuple[float, float]:
    """Wilson's score interval of the share ``correct / asked``."""
    share, z2 = correct / asked, _Z95**2
    centre = share + z2 / (2 * asked)
    half = _Z95 * math.sqrt(share * (1 - share) / asked + z2 / (4 * asked**2))
    return (centre - half) / (1 + z2 / asked), (centre + half) / (1 + z2 / asked)
