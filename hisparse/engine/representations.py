"""Allocates and resets the tensors that algorithms and extensions keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hisparse.algorithms import Representation, RepresentationMemory, RepresentationOwner
from hisparse.cache.allocate import zeros
from hisparse.kernels import upload
from hisparse.types import KVSpec

T = TypeVar("T")


def ignore(*_: Any) -> Any:
    """In place of a hook, in layers without representations: does nothing, and returns None."""


class Representations:
    """All tensors that the algorithm and the extensions declare; initially zero.

    Args:
        kinds: the declared tensors, by name.
        host_pages: pages of the host pool, including the padding page.
        num_slots: request slots.
        device: device of the tensors. Those in host memory are page-locked and mapped for a GPU.

    Attributes:
        tensors: by name, ``[L, host pages, *shape]``, ``[L, request slots, *shape]`` or
            ``[L, *shape]``, depending on the owner. If some layers have no representations, these
            are views that take a layer's number and skip those layers in memory.
        of_pages: the saved tensors of pages, without skipped layers.
        of_model: those of ``of_pages`` whose entries come from the model's own indexer.
        only_of_pages: whether only tensors of pages are saved.
    """

    def __init__(
        self,
        kinds: Mapping[str, Representation],
        kv: KVSpec,
        *,
        host_pages: int,
        num_slots: int,
        device: torch.device,
    ) -> None:
        entries: dict[RepresentationOwner, tuple[int, ...]] = {
            "page": (host_pages,),
            "request": (num_slots,),
            "layer": (),
        }
        self._memories = {name: kind.memory for name, kind in kinds.items()}
        self._saved = {n: kind for n, kind in kinds.items() if kind.per != "layer" and kind.saved}
        self._layers = {name: kind.layers(kv) for name, kind in kinds.items()}
        memory = {
            name: _zeros(r, (len(self._layers[name]), *entries[r.per], *r.shape), device)
            for name, r in kinds.items()
        }
        self.tensors: Mapping[str, Tensor] = {
            name: x if len(x) == kv.num_layers else _LayerTensor.of(x, self._layers[name])
            for name, x in memory.items()
        }
        self._kv = kv
        self._per_page = {n: kind for n, kind in kinds.items() if kind.per == "page"}
        self.of_pages = {n: memory[n] for n, r in self._saved.items() if r.per == "page"}
        self.of_model = {n: x for n, x in self.of_pages.items() if kinds[n].source == "model"}
        self.only_of_pages = len(self.of_pages) == len(self._saved)
        self._request_state = [memory[n] for n, r in kinds.items() if r.per == "request"]
        self._begun: set[int] = set()

    def num_bytes(self, memory: RepresentationMemory) -> int:
        """Bytes of the tensors in one memory."""
        return sum(self.tensors[n].nbytes for n, each in self._memories.items() if each == memory)

    def by_layer(self, keeping: T, otherwise: T, *, selecting: bool = True) -> list[T]:
        """For each of the L layers, ``keeping`` if it has representations, else ``otherwise``.

        Args:
            keeping, otherwise: such as hooks.
            selecting: whether the representations are the algorithm's, not those of extensions.
        """
        layers = self._kv.selecting_layers if selecting else self._kv.full_layers
        return [keeping if x in layers else otherwise for x in range(self._kv.num_layers)]

    def pages_of(self, layer_id: int) -> list[tuple[Tensor, bool]]:
        """Entries of pages in one layer, if any.

        Returns:
            ``[host pages, *shape]`` in their dtypes, and whether the model's indexer gives them,
            maybe before a page is full.
        """
        kinds = {n: x for n, x in self._per_page.items() if layer_id in self._layers[n]}
        return [(self.tensors[n][layer_id], x.source == "model") for n, x in kinds.items()]

    def begin(self, slot: int) -> None:
        """Start a request in a slot; the next forward zeroes the slot's state."""
        self._begun.add(slot)

    def apply_resets(self) -> None:
        """Zero the state of requests that began since the last call."""
        if self._begun:
            for state in self._request_state:
                state[:, upload(sorted(self._begun), state.device)] = 0
            self._begun.clear()

    def fork(self, source: int, target: int) -> None:
        """Copy the request state of slot ``source`` to slot ``target``."""
        self.apply_resets()
        for state in self._request_state:
            state[:, target] = state[:, source]

    def read(self, layer_id: int, slot: int, host_pages: Tensor) -> dict[str, Tensor]:
        """Read the saved entries of a request and of its pages ``host_pages [P] int64``.

        Returns:
            by name, ``[P, *shape]`` of pages or ``[*shape]`` of the request, in the dtype of the
            representation; empty in a layer without representations.
        """
        self.apply_resets()
        return {
            name: self.tensors[name][layer_id, host_pages if kind.per == "page" else slot]
            for name, kind in self._saved.items()
            if layer_id in self._layers[name]
        }

    def write(
        self, layer_id: int, slot: int, host_pages: Tensor, entries: Mapping[str, Tensor]
    ) -> None:
        """Write ``entries``, shapes and dtypes as :meth:`read` has, to ``host_pages [P] int64``."""
        self.apply_resets()
        for name, values in entries.items():
            where = host_pages if self._saved[name].per == "page" else slot
            self.tensors[name][layer_id, where] = values.to(self.tensors[name].device)

    def describe(self) -> dict[str, str]:
        """Names that :meth:`read` returns, with owner, shape and dtype.

        A file is compatible with a cache if both descriptions are equal.
        """
        return {
            name: f"{kind.per} {list(kind.shape)} {kind.dtype}"
            for name, kind in self._saved.items()
        }


class _LayerTensor(Tensor):
    """A tensor ``[layers, ...]`` that is indexed by the numbers of these layers.

    PyTorch's functions take it as the tensor that it is, without skipped layers.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _places: dict[int, int]

    @classmethod
    def of(cls, tensor: Tensor, layers: Sequence[int]) -> _LayerTensor:
        """A view of ``tensor [n, ...]``, whose entries belong to the n ``layers``, ascending."""
        view = tensor.as_subclass(cls)
        view._places = {layer: place for place, layer in enumerate(layers)}
        return view

    def _at(self, key: Any) -> Any:
        layer, *rest = np.index_exp[key]
        return (self._places[int(layer)], *rest)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))

    def __getitem__(self, key: Any) -> Tensor:
        return super().__getitem__(self._at(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(self._at(key), value)


def _zeros(kind: Representation, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A tensor ``[*shape]`` in the dtype of ``kind`` and in its memory."""
    if kind.memory == "device" or device.type == "cpu":
        return zeros(shape, kind.dtype, device)
    num_bytes = torch.Size(shape).numel() * kind.dtype.itemsize
    mapped = _Mapped(zeros([num_bytes], torch.uint8, torch.device("cpu"), pin=True))
    return torch.as_tensor(mapped, device=device).view(kind.dtype).view(shape)


class _Mapped:
    """Page-locked host memory, ``[bytes] uint8``, as a GPU addresses it."""

    def __init__(self, pinned: Tensor) -> None:
        self._pinned = pinned  # The tensor that PyTorch makes of this object keeps it alive.
        self.__cuda_array_interface__ = {
            "shape": tuple(pinned.shape),
            "typestr": "|u1",
            "data": (pinned.data_ptr(), False),
            "version": 2,
        }
