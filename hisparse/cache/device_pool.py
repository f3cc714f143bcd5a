"""The pages in device memory, and the tables that map each row to its pages."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.cache.allocate import zeros
from hisparse.cache.codec import split_layers
from hisparse.kernels import RowState
from hisparse.types import KVSpec, PagedKV, StoredKV

__all__ = ["DevicePool"]


class DevicePool:
    """One pool of device pages per layer, shared by all rows, and every row's LRU tables.

    State row ``slot * H + head`` belongs to one head of a request slot. Each row permanently owns
    one page for its tail. The pages of its device slots come from the pool and return to it.

    Args:
        kv: shapes of the model.
        heads: H, rows per request; a device page holds all KV heads if it is 1, else one.
        num_slots: request slots.
        num_pages: N, pages of one layer, the rows' tail pages included.
        max_row_pages: C, the most device slots that a row may have.
        context_pages: pages of the longest sequence.
        device: device of the pages and tables.

    Attributes:
        kv, heads, max_row_pages, device: as given.
        states: LRU tables of all layers.
        capacity: ``[slots * H] int32``, device slots of each state row.
        tail_pages: ``[L, slots * H] int32``, device page of each state row's tail.
        free_pages: ``[L, N - slots * H] int32``, stack of free device pages.
        num_free: ``[L] int32``, entries of ``free_pages`` that are free.
    """

    def __init__(
        self,
        kv: KVSpec,
        *,
        heads: int,
        num_slots: int,
        num_pages: int,
        max_row_pages: int,
        context_pages: int,
        device: torch.device,
    ) -> None:
        self.kv = kv
        self.heads = heads
        self.device = device
        self.max_row_pages = max_row_pages
        num_rows = num_slots * heads
        layers, stored_heads = kv.num_layers, kv.num_kv_heads if heads == 1 else 1

        def pages(width: int) -> Tensor:
            shape = (layers, num_pages, kv.page_size, stored_heads, width)
            return zeros(shape, kv.stored_dtype, device).transpose(2, 3)

        def table(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        self._k = pages(kv.stored_key_width)
        self._v = self._k[..., : kv.v_head_dim] if kv.latent else pages(kv.v_head_dim)
        # A page's scales are contiguous, as in the host pool.
        shape = (layers, num_pages, stored_heads, kv.page_size, 2)
        scales = zeros(shape, torch.uint8, device) if kv.num_scales else None
        self._layers = split_layers(self._k, self._v, scales)
        tables = (layers, num_rows, max_row_pages)
        page_slots = None if device.type == "cpu" else table(layers, num_rows, context_pages)
        self.states = RowState(table(*tables), table(*tables), table(*tables), page_slots)
        self._layer_states = [self.states.layer(layer) for layer in range(layers)]
        self.capacity = torch.zeros(num_rows, dtype=torch.int32, device=device)
        page_ids = torch.arange(num_pages, dtype=torch.int32, device=device)
        self.tail_pages = page_ids[:num_rows].repeat(layers, 1)
        self.free_pages = table(layers, num_pages - num_rows)
        self.free_pages[:] = page_ids[num_rows:]
        self.num_free = torch.full(
            (layers,), num_pages - num_rows, dtype=torch.int32, device=device
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values, scales included."""
        return self._k.shape[0] * self._k.shape[1] * self.page_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of the rows' tables and of the free lists."""
        tables = (*self.states, self.capacity, self.tail_pages, self.free_pages, self.num_free)
        return sum(t.nbytes for t in tables if t is not None)

    @property
    def page_bytes(self) -> int:
        """Bytes of one device page, scales included."""
        stored_heads = self._k.shape[2]
        return self.kv.page_size * stored_heads * self.kv.head_bytes

    def layer(self, layer_id: int) -> PagedKV:
        """Keys and values of one layer as stored, ``[N, Hr, S, D]`` views."""
        return self.stored(layer_id).kv

    def stored(self, layer_id: int) -> StoredKV:
        """One layer with its scales, if it has any."""
        return self._layers[layer_id]

    def state(self, layer_id: int) -> RowState:
        """One layer's tables."""
        return self._layer_states[layer_id]
