"""Indexes over the keys of requests, in host memory; freed when the request ends."""

from __future__ import annotations

from torch import Tensor, int64, zeros


class RequestIndexes:
    """One tensor per layer and request slot, passed to kernels by address.

    Representations hold small state of a fixed size in device memory; these tensors hold indexes
    that grow with the prompt. A slot without an index has length 0.

    Args:
        num_layers: L.
        num_slots: request slots.
        max_bytes: the most bytes of all indexes; None: unlimited.

    Attributes:
        addresses: ``[L, slots] int64``, addresses of the tensors.
        lengths: ``[L, slots] int64``, tokens that each index covers.
    """

    def __init__(self, num_layers: int, num_slots: int, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._held: dict[int, dict[int, Tensor]] = {}
        self.addresses = zeros(num_layers, num_slots, dtype=int64)
        self.lengths = zeros(num_layers, num_slots, dtype=int64)

    def has_room(self, num_bytes: int) -> bool:
        """Whether ``num_bytes`` more may be stored."""
        return self._max_bytes is None or self.num_bytes + num_bytes <= self._max_bytes

    def put(self, layer_id: int, slot: int, index: Tensor, num_tokens: int) -> None:
        """Store an index; it replaces an earlier one.

        Args:
            layer_id: layer number.
            slot: request slot.
            index: contiguous tensor in host memory.
            num_tokens: tokens from the start of the request that the index covers.
        """
        self._held.setdefault(slot, {})[layer_id] = index
        self.addresses[layer_id, slot] = index.data_ptr()
        self.lengths[layer_id, slot] = num_tokens

    def drop(self, slot: int) -> None:
        """Free the indexes of a slot."""
        if self._held.pop(slot, None):
            self.addresses[:, slot] = 0
            self.lengths[:, slot] = 0

    def fork(self, source: int, target: int) -> None:
        """Share the indexes of request slot ``source`` with ``target``."""
        self.drop(target)
        if source in self._held:
            self._held[target] = dict(self._held[source])
            self.addresses[:, target] = self.addresses[:, source]
            self.lengths[:, target] = self.lengths[:, source]

    @property
    def num_bytes(self) -> int:
        """Host memory of all indexes; a shared index counts once."""
        held = [index for layers in self._held.values() for index in layers.values()]
        return sum({index.data_ptr(): index.nbytes for index in held}.values())
