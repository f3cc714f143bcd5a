"""The tensors in which algorithms remember: allocated, reset and moved in one place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hisparse.algorithms import BaseSparseAlgorithm, Representation, RepresentationOwner
from hisparse.algorithms.request_indexes import RequestIndexes
from hisparse.engine.extensions.prefetch import StepSpeculation
from hisparse.engine.extensions.tail_estimate import TailEstimate
from hisparse.engine.step import SelectionPolicy

__all__ = ["Representations", "entry_bytes", "list_representations"]


def list_representations(
    algorithm: BaseSparseAlgorithm,
    policy: SelectionPolicy,
    *,
    tail_estimate: bool = False,
    speculate: bool = False,
) -> dict[str, Representation]:
    """Everything that is kept beside K and V, by name."""
    found = dict(algorithm.representations(policy))
    if tail_estimate:
        found |= TailEstimate.representations(policy)
    if speculate:
        found |= StepSpeculation.representations(policy)
    return found


def entry_bytes(kinds: Mapping[str, Representation], per: RepresentationOwner) -> int:
    """Bytes that one owner of a kind takes in one layer."""
    return sum(kind.num_bytes for kind in kinds.values() if kind.per == per)


class Representations:
    """Zeros for everything that is remembered.

    Args:
        kinds: what there is, by name.
        num_layers: L.
        host_pages: pages of the host pool, the padding page included.
        num_slots: request slots.
        device: where they lie.
        index_bytes: host memory that indexes may take; None: any.

    Attributes:
        tensors: by name, ``[L, host pages or request slots or nothing, *shape]``.
        indexes: what algorithms keep of a request beside them, in host memory.
    """

    def __init__(
        self,
        kinds: Mapping[str, Representation],
        *,
        num_layers: int,
        host_pages: int,
        num_slots: int,
        device: torch.device,
        index_bytes: int | None = None,
    ) -> None:
        entries: dict[RepresentationOwner, tuple[int, ...]] = {
            "page": (host_pages,),
            "request": (num_slots,),
            "layer": (),
        }
        self._saved = {n: kind for n, kind in kinds.items() if kind.per != "layer" and kind.saved}
        self.tensors = {
            name: torch.zeros((num_layers, *entries[r.per], *r.shape), dtype=r.dtype, device=device)
            for name, r in kinds.items()
        }
        self._of_requests = [self.tensors[name] for name, r in kinds.items() if r.per == "request"]
        self.indexes = RequestIndexes(num_layers, num_slots, index_bytes)
        self._begun: set[int] = set()
        self._ended: set[int] = set()

    def begin(self, slot: int) -> None:
        """A request takes over a slot: its state is zeros from the next forward on."""
        self._begun.add(slot)

    def end(self, slot: int) -> None:
        """A request is over: its indexes are freed before the next forward."""
        self._ended.add(slot)

    def apply_resets(self) -> None:
        """Forget what the slots that changed hands held."""
        for slot in self._begun | self._ended:
            self.indexes.drop(slot)
        self._ended.clear()
        if self._begun:
            slots = sorted(self._begun)
            for state in self._of_requests:
                state[:, slots] = 0
            self._begun.clear()

    def fork(self, source: int, target: int) -> None:
        """A request goes on from where another one is."""
        self.apply_resets()
        for state in self._of_requests:
            state[:, target] = state[:, source]
        self.indexes.fork(source, target)

    def read(self, layer_id: int, slot: int, host_pages: Tensor) -> dict[str, Tensor]:
        """What is saved of a request: entries of its pages ``[P] int64``, and its own."""
        self.apply_resets()
        return {
            name: self.tensors[name][layer_id, host_pages if kind.per == "page" else slot]
            for name, kind in self._saved.items()
        }

    def write(
        self, layer_id: int, slot: int, host_pages: Tensor, entries: Mapping[str, Tensor]
    ) -> None:
        """The contrary of :meth:`read`."""
        self.apply_resets()
        for name, values in entries.items():
            where = host_pages if self._saved[name].per == "page" else slot
            self.tensors[name][layer_id, where] = values.to(self.tensors[name].device)

    def describe(self) -> dict[str, str]:
        """Names that :meth:`read` gives, and what stands there: two that agree can be exchanged."""
        return {
            name: f"{kind.per} {list(kind.shape)} {kind.dtype}"
            for name, kind in self._saved.items()
        }
