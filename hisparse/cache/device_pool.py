"""The pages in device memory, and the tables that map each row to its pages."""

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from hisparse.cache.formats import format_of
from hisparse.kernels import RowState
from hisparse.types import KVSpec, StoredKV


@dataclass(frozen=True, kw_only=True)
class PoolSizes:
    """Sizes of the allocations on the device.

    Attributes:
        num_slots: request slots, including slot 0 of the padding.
        device_pages: device pages of each layer, including tail pages.
        min_row_pages, max_row_pages: smallest and largest capacity of a row, in device pages.
        context_pages: pages of the longest sequence.
        staging_pages: pages of one staging tile.
    """

    num_slots: int
    device_pages: int
    min_row_pages: int
    max_row_pages: int
    context_pages: int
    staging_pages: int


class RowSnapshot(NamedTuple):
    """Which pages some rows held in one layer, and in which LRU order; no K and no V.

    Attributes:
        rows: ``[R] int64``, state rows.
        slot_pages, lru_order, device_pages: ``[R, W] int32``, see :class:`RowState`.
        tail_pages: ``[R] int32``, device page of each row's tail.
    """

    rows: Tensor
    slot_pages: Tensor
    lru_order: Tensor
    device_pages: Tensor
    tail_pages: Tensor

    def take(self, index: Tensor) -> Self:
        """The rows ``index [n] int64`` of the snapshot."""
        return type(self)(*(table[index] for table in self))


class DevicePool:
    """One pool of device pages per layer, shared by all rows, and every row's LRU tables.

    State row ``slot * H + head`` belongs to one head of a request slot. Each row permanently owns
    one page for its tail. The pages of its device slots come from the pool and return to it.

    Args:
        heads: H, rows per request; a device page holds all KV heads if it is 1, else one.
        sizes: N is ``device_pages``, C ``max_row_pages``.
        device: device of the pages and tables.

    Attributes:
        kv, heads, device: as given.
        max_row_pages: C.
        context_pages: pages of the longest sequence.
        format: how K and V are stored.
        states: LRU tables of all layers.
        capacity: ``[slots * H] int32``, device slots of each state row.
        tail_pages: ``[L, slots * H] int32``, device page of each state row's tail.
        free_pages: ``[L, N - slots * H] int32``, stack of free device pages.
        num_free: ``[L] int32``, entries of ``free_pages`` that are free.
    """

    def __init__(self, kv: KVSpec, heads: int, sizes: PoolSizes, device: torch.device) -> None:
        self.kv = kv
        self.format = format_of(kv)
        self.heads = heads
        self.device = device
        self.max_row_pages, self.context_pages = sizes.max_row_pages, sizes.context_pages
        num_rows = sizes.num_slots * heads
        layers, self._num_pages = kv.num_layers, sizes.device_pages
        self._stored_heads = kv.num_kv_heads if heads == 1 else 1
        pools = self.format.new_pages((layers, sizes.device_pages), self._stored_heads, device)
        self._layers = [self.format.join(layer) for layer in zip(*pools, strict=True)]

        def table(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        tables = (layers, num_rows, sizes.max_row_pages)
        page_slots = None if device.type == "cpu" else table(layers, num_rows, sizes.context_pages)
        self.states = RowState(table(*tables), table(*tables), table(*tables), page_slots)
        self._layer_states = [self.states.layer(layer) for layer in range(layers)]
        self.capacity = torch.zeros(num_rows, dtype=torch.int32, device=device)
        page_ids = torch.arange(sizes.device_pages, dtype=torch.int32, device=device)
        self.tail_pages = page_ids[:num_rows].repeat(layers, 1)
        num_free = sizes.device_pages - num_rows
        self.free_pages = table(layers, num_free)
        self.free_pages[:] = page_ids[num_rows:]
        self.num_free = torch.full((layers,), num_free, dtype=torch.int32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values, scales included."""
        return self.kv.num_layers * self._num_pages * self.page_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the rows' tables and of the free lists."""
        tables = (*self.states, self.capacity, self.tail_pages, self.free_pages, self.num_free)
        return sum(t.nbytes for t in tables if t is not None)

    @property
    def page_bytes(self) -> int:
        """Bytes of one device page, scales included."""
        return self.kv.page_size * self._stored_heads * self.format.head_bytes

    def stored(self, layer_id: int) -> StoredKV:
        """Keys and values of one layer as stored, ``[N, Hr, S, D]`` views, and their scales."""
        return self._layers[layer_id]

    def state(self, layer_id: int) -> RowState:
        """One layer's tables."""
        return self._layer_states[layer_id]

    def save_rows(self, layer_id: int, rows: Tensor, width: int) -> RowSnapshot:
        """Copy the tables of ``rows [R] int64``; ``width`` is at least the capacity of each."""
        held, order, pages = (table[rows, :width] for table in self.state(layer_id)[:3])
        return RowSnapshot(rows, held, order, pages, self.tail_pages[layer_id, rows])

    def restore_rows(self, layer_id: int, saved: RowSnapshot) -> None:
        """Write a snapshot back to the tables, which the rows' capacities still allow.

        The device pages keep their K and V; see :meth:`KVReadWrite.read_changed`.
        """
        state, rows = self.state(layer_id), saved.rows
        width = saved.slot_pages.shape[1]
        state.slot_pages[rows, :width] = saved.slot_pages
        state.lru_order[rows, :width] = saved.lru_order
        state.device_pages[rows, :width] = saved.device_pages
        self.tail_pages[layer_id, rows] = saved.tail_pages
        if state.page_slots is not None and width:
            held = saved.slot_pages >= 0
            slot = torch.arange(width, device=rows.device)
            # An empty slot repeats what the first one with a page writes.
            slot = torch.where(held, slot, held.int().argmax(1, keepdim=True))
            pages = saved.slot_pages.gather(1, slot).clamp(min=0).long()
            state.page_slots[rows[:, None], pages] = slot.to(torch.int32)
