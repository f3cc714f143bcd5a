"""The ratio of paired times, and its 95% interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

__all__ = ["LIMIT", "PAIRS", "ratio_of_pairs"]

#: What is not used may cost this much, as the upper end of the interval.
LIMIT = 1.03
#: Student's t for 95%, by pairs.
_T95 = {2: 12.706, 20: 2.093, 40: 2.023}
PAIRS = tuple(_T95)


def ratio_of_pairs(pairs: Sequence[tuple[float, float]]) -> tuple[float, tuple[float, float]]:
    """The geometric mean of second over first, and its 95% interval.

    Args:
        pairs: seconds of each pair; as many as one of ``PAIRS``.
    """
    logs = [math.log(second / first) for first, second in pairs]
    half = _T95[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    mean = statistics.mean(logs)
    return math.exp(mean), (math.exp(mean - half), math.exp(mean + half))
