"""Algorithms that choose pages; each is one file and one class."""

from hisparse.algorithms.base import (
    ALGORITHMS,
    BaseSparseAlgorithm,
    PageRun,
    Representation,
    register_algorithm,
)
from hisparse.algorithms.page_score import PageScoreAlgorithm
from hisparse.algorithms.quest import Quest

__all__ = [
    "ALGORITHMS",
    "BaseSparseAlgorithm",
    "PageRun",
    "PageScoreAlgorithm",
    "Quest",
    "Representation",
    "register_algorithm",
]
