"""Algorithms that choose pages; each is one file and one class."""

from hisparse.algorithms.base import (
    ALGORITHMS,
    BaseSparseAlgorithm,
    Representation,
    RepresentationOwner,
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
    "PageScoreAlgorithm",
    "Quest",
    "Representation",
    "RepresentationOwner",
    "Streaming",
    "register_algorithm",
]
