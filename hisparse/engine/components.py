"""The components of an engine, in one object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hisparse.adapters import BackendAdapter
from hisparse.algorithms import BaseSparseAlgorithm, SelectionPolicy
from hisparse.cache import SparseKVCacheManager
from hisparse.engine.extensions.base import Extension
from hisparse.engine.modes import AttentionModes
from hisparse.engine.representations import Representations

#: Joins the query heads of all ranks: ``[T, Hq, D] -> [T, ranks * Hq, D]``, the same on every rank.
GatherQueries = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Components:
    """The components of an engine; :func:`hisparse.engine.build.build` creates them.

    Attributes:
        policy: shapes of the model and the rules of selections.
        algorithm: selects pages.
        manager: stores and loads pages.
        adapter: attends.
        representations: state of the algorithm and of the extensions.
        modes: decides which requests are dense and which layers share a selection.
        extensions: extensions, in the order of their hooks.
        gather_queries: joins the query heads of ranks that share the latents of an MLA model, so
            that each rank selects what one rank would; None: this rank has all heads of a
            selection.
    """

    policy: SelectionPolicy
    algorithm: BaseSparseAlgorithm
    manager: SparseKVCacheManager
    adapter: BackendAdapter
    representations: Representations
    modes: AttentionModes
    extensions: Sequence[Extension] = ()
    gather_queries: GatherQueries | None = None
