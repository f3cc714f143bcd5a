"""The contract of an extension: an optional feature of the decode step.

An extension is one file in this folder, or in any package with an entry point in the group
``hisparse.extensions``. Its name is a configuration key. It overrides the hooks that it needs::

    before_step
    before_layer -> (the algorithm selects) -> refine_selection -> after_selection -> (attend)
        -> after_attention, for each layer
    after_step
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from torch import Tensor

from hisparse.adapters import Attended, BackendAdapter, TableLimits
from hisparse.algorithms import BaseSparseAlgorithm, DecodeStep, Representation, SelectionPolicy
from hisparse.cache import SparseKVCacheManager
from hisparse.config import EXTENSIONS, HiSparseConfig
from hisparse.engine.modes import AttentionModes
from hisparse.engine.representations import Representations
from hisparse.errors import ConfigError
from hisparse.types import Selection

#: Joins the query heads of all ranks: ``[T, Hq, D] -> [T, ranks * Hq, D]``, the same on every rank.
GatherQueries = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Components:
    """The components of an engine, which :func:`hisparse.engine.build.build` creates.

    Attributes:
        config: the settings.
        policy: shapes of the model and the rules of selections.
        algorithm: selects pages.
        manager: stores and loads pages; ``manager.counters`` counts by name.
        adapter: attends.
        representations: state of the algorithm and of the extensions.
        modes: decides which requests are dense and which layers select.
        gather_queries: joins the query heads of ranks that share the latents of an MLA model, so
            that each rank selects what one rank would. ``[B, Hq, D]`` -> ``[B, ranks * Hq, D]``;
            or None if this rank has all heads of a selection.
    """

    config: HiSparseConfig
    policy: SelectionPolicy
    algorithm: BaseSparseAlgorithm
    manager: SparseKVCacheManager
    adapter: BackendAdapter
    representations: Representations
    modes: AttentionModes
    gather_queries: GatherQueries | None = None

    @property
    def state(self) -> Mapping[str, Tensor]:
        """Representations of the algorithm and all extensions: name to tensor, in their dtypes."""
        return self.representations.tensors


class Extension:
    """Base class; every hook does nothing unless it is overridden.

    Hooks are looked up on the class when the engine is built, and only those that it overrides are
    called: a hook that is set on an instance, or later, is not.

    Hooks run in every decode step and follow the rules of algorithms: tensor operations without
    host syncs or loops over requests, so that a step can be captured in a CUDA graph. Only
    ``before_step`` and ``after_step`` run outside of the graph, on the host, in each replay.

    Args:
        options: an instance of ``options_type``.
        context: the components of the engine.
    """

    #: Frozen dataclass of options: the value of the configuration key.
    options_type: ClassVar[type[Any]]
    #: The extension's counters on the device: name to description, for the metrics.
    counters: ClassVar[Mapping[str, str]] = {}
    #: As an algorithm's, for the tensors of :meth:`state`.
    store_version: ClassVar[int | None] = None
    #: Whether the extension works only in a process that has all layers of the model.
    needs_all_layers: ClassVar[bool] = False

    def __init__(self, options: Any, context: Components) -> None:
        self.options = options
        self.context = context

    @classmethod
    def check(cls, options: Any, config: HiSparseConfig) -> None:
        """Raise ``ConfigError`` if the extension cannot run with the other settings."""

    @classmethod
    def state(cls, options: Any, policy: SelectionPolicy) -> dict[str, Representation]:
        """Tensors that the extension keeps; the sizing formula includes them."""
        return {}

    @classmethod
    def attended_tables(
        cls, policy: SelectionPolicy, *, max_requests: int, context_pages: int
    ) -> Sequence[TableLimits]:
        """Page tables that the extension attends over, for the adapter's workspace.

        Args:
            policy: shapes of the model and the rules of selections.
            max_requests: requests of a step.
            context_pages: pages of the longest context.
        """
        return ()

    def store_pages(self, layer_id: int, keys: Tensor, values: Tensor, host_pages: Tensor) -> None:
        """Called after complete pages were written, in prefill or decode.

        Args:
            layer_id: layer number.
            keys, values: ``[P, S, Hkv, D]``, model's dtype; without a page, uninitialised on a GPU.
            host_pages: ``[P]``, int32 in prefill and int64 in decode; the padding page 0 for
                entries without a page.
        """

    def before_step(self, slots: np.ndarray, seq_lens: np.ndarray, sparse: np.ndarray) -> None:
        """Called on the host before a decode step, captured or not.

        Args:
            slots: ``[B] int64``, request slots.
            seq_lens: ``[B] int64``, tokens of each request, the new one included.
            sparse: ``[B] bool``, requests that attend what the algorithm selects.
        """

    def after_step(self, *, complete: bool) -> None:
        """Called on the host after a decode step: after a replay, before the next forward begins.

        It may be called without a step.

        Args:
            complete: False if an exception ended the step.
        """

    def before_layer(self, layer_id: int, step: DecodeStep) -> None:
        """Called at the start of a decode layer, for requests that attend sparsely."""

    def refine_selection(
        self, layer_id: int, queries: Tensor, selection: Selection, step: DecodeStep
    ) -> Selection:
        """Replace the algorithm's selection.

        Args:
            layer_id: number of a layer that selects.
            queries: ``[B, Hq, D]``, model's dtype, before the softmax scale.
            selection: the selection so far.
            step: the requests that attend sparsely.
        """
        return selection

    def after_selection(self, layer_id: int, selection: Selection, step: DecodeStep) -> None:
        """Called with the final selection, which no extension changes any more.

        Args:
            layer_id: number of a layer that selects.
            selection: what this layer and its followers attend.
            step: the requests that attend sparsely.
        """

    def after_attention(
        self,
        layer_id: int,
        queries: Tensor,
        selection: Selection,
        step: DecodeStep,
        attended: Attended,
    ) -> Attended:
        """Change or extend the attention over the selected pages.

        Args:
            layer_id: layer number.
            queries: ``[R, Q, D]``, model's dtype, before the softmax scale; Q heads of each row.
            selection: the attended pages.
            step: the requests that attend sparsely.
            attended: out ``[R, Q, Dv]``, natural log-sum-exp ``[R, Q] float32``.
        """
        return attended


def overriding(hook: str, extensions: Iterable[Extension]) -> tuple[Extension, ...]:
    """The extensions that override a hook; a step calls it on no other."""
    return tuple(x for x in extensions if getattr(type(x), hook) is not getattr(Extension, hook))


E = TypeVar("E", bound=Extension)


def register_extension(name: str) -> Callable[[type[E]], type[E]]:
    """Class decorator: register an extension; ``name`` is also its configuration key."""
    if name in HiSparseConfig.core_keys():
        raise ConfigError(f"extension {name!r}: the name is a configuration key; choose another")

    def decorate(cls: type[E]) -> type[E]:
        EXTENSIONS.register(name)(cls)
        return cls

    return decorate
