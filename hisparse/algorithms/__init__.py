"""Algorithms that choose pages; each is one file and one class."""

from hisparse.algorithms.base import (
    ALGORITHMS,
    BaseSparseAlgorithm,
    PageRun,
    Representation,
    register_algorithm,
)
from hisparse.algorithms.oracle import Oracle
from hisparse.algorithms.page_score import PageScoreAlgorithm
from hisparse.algorithms.quest import Quest
from hisparse.algorithms.streaming import Streaming

__all__ = [
    "ALGORITHMS",
    "BaseSparseAlgorithm",
    "Oracle",
    "PageRun",
    "PageScoreAlgorithm",
    "Quest",
    "Representation",
    "Streaming",
    "register_algorithm",
]
