"""The contract between an algorithm and the system that serves it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from hisparse.algorithms.step import DecodeStep, PrefillStep, SelectionPolicy
from hisparse.config import HiSparseConfig
from hisparse.options import from_options
from hisparse.registry import Registry
from hisparse.types import KVSpec, Selection, SelectionScope

__all__ = [
    "ALGORITHMS",
    "BaseSparseAlgorithm",
    "Representation",
    "RepresentationOwner",
    "build_algorithm",
    "entry_bytes",
    "register_algorithm",
]

#: What a representation belongs to.
RepresentationOwner = Literal["page", "request", "layer"]


@dataclass(frozen=True)
class Representation:
    """A tensor that an algorithm keeps for each layer; the coordinator owns and sizes it.

    Attributes:
        shape: of one entry.
        dtype: of the stored values.
        per: what has an entry. "page": every host page, ``[L, host pages, *shape]``; requests that
            share a prefix share them, so they may not depend on anything but the page's own
            tokens. "request": every request slot, ``[L, request slots, *shape]``; zeros when a
            request begins. "layer": the layer itself, ``[L, *shape]``, constants of the model.
        saved: whether a context that is saved to a file holds it; what is not is zeros when the
            context is loaded.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    per: RepresentationOwner = "page"
    saved: bool = True

    @property
    def num_bytes(self) -> int:
        """Bytes of one entry in one layer."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def entry_bytes(kinds: Mapping[str, Representation], per: RepresentationOwner) -> int:
    """Bytes that one owner of the kind ``per`` takes in one layer."""
    return sum(kind.num_bytes for kind in kinds.values() if kind.per == per)


class BaseSparseAlgorithm(ABC):
    """Chooses the pages that a decode step attends over.

    Subclasses are frozen dataclasses: their fields are their options. They hold no state: what
    they remember lies in representations. The methods are pure tensor functions without host
    syncs or loops over requests. The class attributes say what an algorithm can do; configuration
    is checked against them.
    """

    #: Selection scopes that the algorithm can do, best first.
    scopes: ClassVar[tuple[SelectionScope, ...]] = ("kv_head", "layer", "query_head")
    #: Page sizes that it can do; None: any.
    page_sizes: ClassVar[tuple[int, ...] | None] = None
    #: Whether it keeps as many pages as a query needs, up to ``device_buffer_size``, and not
    #: always ``budget``. Contexts within the budget are attended whole and never reach it.
    variable_lengths: ClassVar[bool] = False
    #: Whether it scores keys where they lie in host memory.
    reads_host_keys: ClassVar[bool] = False
    #: Whether it scores by the model's own indexer: steps carry ``indexer``.
    indexer: ClassVar[bool] = False
    #: Whether the tail page competes with the others instead of always being attended: a selection
    #: may hold ``budget / S`` pages, and only if it holds fewer is the tail page attended as well.
    ranks_tail: ClassVar[bool] = False

    @property
    def query_window(self) -> int:
        """Queries at the end of the prompt that it has to see, so that no cache may skip them."""
        return 0

    def resolved(
        self, policy: SelectionPolicy, *, context_length: int, host_bytes: int, device_bytes: int
    ) -> BaseSparseAlgorithm:
        """The algorithm, its options resolved for the place where it serves; called once, at start.

        Args:
            policy: shapes of the model and what selections have to keep to.
            context_length: tokens, the longest sequence.
            host_bytes: host memory for the KV pool, and for what algorithms keep beside it.
            device_bytes: device memory for all that is kept there.
        """
        return self

    def host_token_bytes(self, kv: KVSpec) -> int:
        """Host memory that is kept at most for one token beside its K and V, all layers."""
        return 0

    @abstractmethod
    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        """What is remembered, by name."""

    def initialize(self, representations: Mapping[str, Tensor], policy: SelectionPolicy) -> None:
        """Fill what is constant, once, before the first request; all representations are zeros.

        Args:
            representations: name to tensor, as :class:`Representation` describes.
            policy: shapes of the model and what selections have to keep to.

        Raises:
            ConfigError: the constants cannot be had, for example from a file that an option names.
        """
        return

    @abstractmethod
    def construct_representations(
        self, keys: Tensor, queries: Tensor, layer_id: int, step: PrefillStep
    ) -> None:
        """Prefill: remember what later steps need of this chunk.

        Args:
            keys: ``[P, S, Hkv, D]``, keys of the pages that this chunk completed; P may be 0.
            queries: ``[T, Hq, D]``, queries of the chunk.
            layer_id: layer number, counted from the first layer of this rank.
            step: the chunk.
        """

    @abstractmethod
    def update_representations(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: DecodeStep
    ) -> None:
        """Decode: store what later steps score the pages by that this step has filled.

        Args:
            keys: ``[B, S, Hkv, D]``, keys of each request's tail page.
            layer_id: layer number.
            host_pages: ``[B] int64``, where the tail page lies; the padding page 0 for a request
                whose tail page is not full, so that every request can be written.
            step: the step.
        """

    def select_prefill(self, layer_id: int, step: PrefillStep) -> Tensor | None:
        """For models that were trained with sparse prefill: what each query of a chunk attends.

        Args:
            layer_id: layer number.
            step: the chunk, its own pages' representations constructed.

        Returns:
            positions ``[T, K] int32``, none twice, none after the query's own, -1 where there is
            none; None: everything up to the query, as nearly all models were trained.
        """
        return None

    @abstractmethod
    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        """Choose at most ``step.policy.max_pages`` of each request's full pages.

        Sinks and recent pages are always in it. Not called when all requests are within the
        budget.

        Args:
            queries: ``[B, Hq, D]``.
            layer_id: layer number.
            step: the step.
        """


A = TypeVar("A", bound=BaseSparseAlgorithm)

ALGORITHMS: Registry[BaseSparseAlgorithm] = Registry(
    "algorithm", package="hisparse.algorithms", entry_point_group="hisparse.algorithms"
)


def register_algorithm(name: str) -> Callable[[type[A]], type[A]]:
    """Class decorator: make an algorithm known under ``name``; a taken name is an error."""

    def decorate(cls: type[A]) -> type[A]:
        ALGORITHMS.register(name)(cls)
        return cls

    return decorate


def build_algorithm(config: HiSparseConfig) -> BaseSparseAlgorithm:
    """The algorithm that ``config`` names, with the options of ``algorithm_config``.

    Raises:
        ConfigError: there is no such algorithm, or an option cannot be used.
    """
    name = config.algorithm
    return from_options(ALGORITHMS.get(name), name, "algorithm_config", config.algorithm_config)
