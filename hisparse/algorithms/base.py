"""The contract between an algorithm and the system that serves it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from hisparse.registry import Registry
from hisparse.types import KVSpec, Selection, SelectionScope

if TYPE_CHECKING:
    from hisparse.batch import DecodeStep, SelectionPolicy

__all__ = ["ALGORITHMS", "BaseSparseAlgorithm", "PageRun", "Representation", "register_algorithm"]


@dataclass(frozen=True)
class Representation:
    """What an algorithm stores for one page of one layer.

    Attributes:
        shape: per host page.
        dtype: of the stored values.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one page in one layer."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True)
class PageRun:
    """Complete pages of one request that a prefill chunk has just filled.

    Attributes:
        policy: shapes of the model and what selections have to keep to.
        representations: name to ``[L, host pages, ...]``, owned by the coordinator.
        host_pages: ``[P] int32``, where the pages lie.
    """

    policy: SelectionPolicy
    representations: dict[str, Tensor]
    host_pages: Tensor


class BaseSparseAlgorithm(ABC):
    """Chooses the pages that a decode step attends over.

    Subclasses are frozen dataclasses: their fields are their options. They hold no state: what
    they remember about pages lies in representations, which the coordinator owns, sizes and
    indexes by host page, so requests that share a prefix share them. The methods are pure tensor
    functions without host syncs or loops over requests.
    """

    #: Selection scopes that the algorithm can do, best first.
    scopes: tuple[SelectionScope, ...] = ("kv_head", "layer", "query_head")

    @abstractmethod
    def representations(self, kv: KVSpec) -> dict[str, Representation]:
        """What is stored for every page, by name."""

    @abstractmethod
    def construct_representations(
        self, keys: Tensor, queries: Tensor, layer_id: int, pages: PageRun
    ) -> None:
        """Prefill: store what later steps score these pages by.

        Args:
            keys: ``[P, S, Hkv, D]``, keys of the pages that this chunk completed.
            queries: ``[T, Hq, D]``, queries of the chunk.
            layer_id: layer number, counted from the first layer of this rank.
            pages: where the pages lie.
        """

    @abstractmethod
    def update_representations(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, batch: DecodeStep
    ) -> None:
        """Decode: store what later steps score the pages by that this step has filled.

        Args:
            keys: ``[B, S, Hkv, D]``, keys of each request's tail page.
            layer_id: layer number.
            host_pages: ``[B] int64``, where the tail page lies; the padding page 0 for a request
                whose tail page is not full, so that every request can be written.
            batch: the step.
        """

    @abstractmethod
    def retrieve_topk(self, queries: Tensor, layer_id: int, batch: DecodeStep) -> Selection:
        """Choose at most ``batch.policy.max_pages`` of each request's full pages.

        Args:
            queries: ``[B, Hq, D]``.
            layer_id: layer number.
            batch: the step.
        """


A = TypeVar("A", bound=BaseSparseAlgorithm)

ALGORITHMS: Registry[BaseSparseAlgorithm] = Registry("algorithm", "hisparse.algorithms")


def register_algorithm(name: str) -> Callable[[type[A]], type[A]]:
    """Class decorator: make an algorithm known under ``name``; a taken name is an error."""

    def decorate(cls: type[A]) -> type[A]:
        ALGORITHMS.register(name)(cls)
        return cls

    return decorate
