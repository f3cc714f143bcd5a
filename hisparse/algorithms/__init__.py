"""The contract of sparse algorithms, and the built-in ones, one file each.

An algorithm's file needs no other import of hisparse than this one::

    from hisparse.algorithms import KVSpec, PageScoreAlgorithm, register_algorithm
"""

from hisparse.algorithms.base import (
    ALGORITHMS,
    BaseSparseAlgorithm,
    Representation,
    RepresentationMemory,
    RepresentationOwner,
    build_algorithm,
    entry_bytes,
    register_algorithm,
)
from hisparse.algorithms.page_score import PageScoreAlgorithm, RankedPagesAlgorithm, tail_logits
from hisparse.algorithms.step import DecodeStep, PrefillStep, SelectionPolicy
from hisparse.types import KVSpec, Selection, SelectionScope

__all__ = [
    "ALGORITHMS", "BaseSparseAlgorithm", "DecodeStep", "KVSpec", "PageScoreAlgorithm",
    "PrefillStep", "RankedPagesAlgorithm", "Representation", "RepresentationMemory",
    "RepresentationOwner", "Selection", "SelectionPolicy", "SelectionScope", "build_algorithm",
    "entry_bytes", "register_algorithm", "tail_logits",
]  # fmt: skip
