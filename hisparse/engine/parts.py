"""The parts of an engine, in one object."""

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
    """The parts of an engine; :func:`hisparse.engine.build.build` creates them.

    Attributes:
        policy: shapes of the model and the rules of selections.
        algorithm: selects pages.
        manager: stores and loads pages.
        adapter: attends.
        representations: state of the algorithm and of the extensions.
        modes: decides which requests are dense and which layers share a selection.
        extensions: extensions, in the order of their hooks.
    """

    policy: SelectionPolicy
    algorithm: BaseSparseAlgorithm
    manager: SparseKVCacheManager
    adapter: BackendAdapter
    representations: Representations
    modes: AttentionModes
    extensions: Sequence[Extension] = ()
