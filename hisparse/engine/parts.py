"""The parts that a coordinator leads, in one object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hisparse.adapters import BackendAdapter
from hisparse.algorithms import BaseSparseAlgorithm, SelectionPolicy
from hisparse.cache import SparseKVCacheManager
from hisparse.engine.extensions.base import Extension
from hisparse.engine.modes import AttentionModes
from hisparse.engine.representations import Representations

__all__ = ["EngineParts"]


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """Made by :func:`hisparse.engine.build.build`.

    Attributes:
        policy: shapes of the model and the rules of selections.
        algorithm: selects pages.
        manager: keeps pages and brings them in.
        adapter: attends.
        representations: state of the algorithm and of the extensions.
        modes: which requests are dense, which layers share a selection.
        extensions: in the order in which their hooks run.
    """

    policy: SelectionPolicy
    algorithm: BaseSparseAlgorithm
    manager: SparseKVCacheManager
    adapter: BackendAdapter
    representations: Representations
    modes: AttentionModes
    extensions: Sequence[Extension] = ()
