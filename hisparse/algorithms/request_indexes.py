"""Indexes over requests' keys in host memory: as large as a prompt, freed with the request."""

from __future__ import annotations

from torch import Tensor, int64, zeros

__all__ = ["RequestIndexes"]


class RequestIndexes:
    """One tensor per layer and request slot; kernels find it by address.

    What representations are for small state of a fixed size, in device memory, this is for an
    index that grows with the prompt. A slot without one has length 0.

    Args:
        num_layers: L.
        num_slots: request slots.
        max_bytes: that all of them may take; None: any.

    Attributes:
        addresses: ``[L, slots] int64``, where the tensors lie.
        lengths: ``[L, slots] int64``, tokens that each covers.
    """

    def __init__(self, num_layers: int, num_slots: int, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._held: dict[int, dict[int, Tensor]] = {}
        self.addresses = zeros(num_layers, num_slots, dtype=int64)
        self.lengths = zeros(num_layers, num_slots, dtype=int64)

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes more may be kept."""
        return self._max_bytes is None or self.num_bytes + num_bytes <= self._max_bytes

    def put(self, layer_id: int, slot: int, index: Tensor, num_tokens: int) -> None:
        """Keep an index instead of the one that was there.

        Args:
            layer_id: layer number.
            slot: request slot.
            index: contiguous, in host memory.
            num_tokens: tokens that it covers, the first ones of the request.
        """
        self._held.setdefault(slot, {})[layer_id] = index
        self.addresses[layer_id, slot] = index.data_ptr()
        self.lengths[layer_id, slot] = num_tokens

    def drop(self, slot: int) -> None:
        """Free what a slot holds."""
        if self._held.pop(slot, None):
            self.addresses[:, slot] = 0
            self.lengths[:, slot] = 0

    def fork(self, source: int, target: int) -> None:
        """A request goes on from where another one is: they share its indexes."""
        self.drop(target)
        if source in self._held:
            self._held[target] = dict(self._held[source])
            self.addresses[:, target] = self.addresses[:, source]
            self.lengths[:, target] = self.lengths[:, source]

    @property
    def num_bytes(self) -> int:
        """Host memory that is held; what requests share counts once."""
        held = [index for layers in self._held.values() for index in layers.values()]
        return sum({index.data_ptr(): index.nbytes for index in held}.values())
