"""The tensors in which algorithms and extensions keep state: allocated and reset in one place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hisparse.algorithms import Representation, RepresentationOwner
from hisparse.algorithms.request_indexes import RequestIndexes

__all__ = ["Representations"]


class Representations:
    """Zeros for every tensor that an algorithm or an extension declares.

    Args:
        kinds: the declared tensors, by name.
        num_layers: L.
        host_pages: pages of the host pool, the padding page included.
        num_slots: request slots.
        device: where they lie.
        index_bytes: host memory that indexes may take; None: any.

    Attributes:
        tensors: by name, ``[L, host pages or request slots or nothing, *shape]``.
        indexes: host-memory indexes that algorithms keep for each request.
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
        """A request takes over a slot: its state is zeroed before the next forward."""
        self._begun.add(slot)

    def end(self, slot: int) -> None:
        """A request is over: its indexes are freed before the next forward."""
        self._ended.add(slot)

    def apply_resets(self) -> None:
        """Clear the state of slots that changed hands since the last call."""
        for slot in self._begun | self._ended:
            self.indexes.drop(slot)
        self._ended.clear()
        if self._begun:
            slots = sorted(self._begun)
            for state in self._of_requests:
                state[:, slots] = 0
            self._begun.clear()

    def fork(self, source: int, target: int) -> None:
        """Let a request continue from the state of another one."""
        self.apply_resets()
        for state in self._of_requests:
            state[:, target] = state[:, source]
        self.indexes.fork(source, target)

    def read(self, layer_id: int, slot: int, host_pages: Tensor) -> dict[str, Tensor]:
        """The saved entries of a request: those of its pages ``host_pages [P]``, and its own."""
        self.apply_resets()
        return {
            name: self.tensors[name][layer_id, host_pages if kind.per == "page" else slot]
            for name, kind in self._saved.items()
        }

    def write(
        self, layer_id: int, slot: int, host_pages: Tensor, entries: Mapping[str, Tensor]
    ) -> None:
        """Write entries as :meth:`read` returned them."""
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
