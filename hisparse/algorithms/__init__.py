"""Algorithms that choose pages; each is one file and one class."""

from hisparse.algorithms._tail import tail_logits
from hisparse.algorithms.base import (
    ALGORITHMS,
    BaseSparseAlgorithm,
    Representation,
    RepresentationOwner,
    register_algorithm,
)
from hisparse.algorithms.dipr import DIPR
from hisparse.algorithms.dsa import DSA
from hisparse.algorithms.oracle import Oracle
from hisparse.algorithms.page_score import PageScoreAlgorithm
from hisparse.algorithms.quest import Quest
from hisparse.algorithms.sketch import Sketch
from hisparse.algorithms.snapkv import SnapKV
from hisparse.algorithms.streaming import Streaming
from hisparse.algorithms.topp import TopP

__all__ = [
    "ALGORITHMS",
    "DIPR",
    "DSA",
    "BaseSparseAlgorithm",
    "Oracle",
    "PageScoreAlgorithm",
    "Quest",
    "Representation",
    "RepresentationOwner",
    "Sketch",
    "SnapKV",
    "Streaming",
    "TopP",
    "register_algorithm",
    "tail_logits",
]
