"""Manages every page: host pool, device pages, and the transfers between them."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hisparse.cache.counters import Counters
from hisparse.cache.device_pool import DevicePool
from hisparse.cache.host_pool import HostKVPool
from hisparse.cache.kv_io import KVReadWrite
from hisparse.cache.residency import Residency, RowCapacities
from hisparse.cache.staging import Staging
from hisparse.cache.streams import SideStream, make_stream
from hisparse.cache.swap_in import SwapIn


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


class SparseKVCacheManager:
    """Keeps a working set of each request's pages on the device.

    A decode layer makes three calls: ``kv_io.append`` writes the new token, ``loader.swap_in``
    makes the selected pages resident, and ``kv_io.promote_tails`` moves full tail pages into the
    LRU.

    Args:
        host: the whole KV cache.
        sizes: of the allocations on the device.
        device: where the device pages, the rows' tables and staging are.
        heads: H, rows per request.
        counters: totals of hits, misses and bytes.
        checked: verify selections and resident bytes in every step, which waits for the device.
        aside: replaces the device's own side stream.

    Attributes:
        host, counters, checked: as given.
        device: the device pages and the rows' tables.
        aside: runs what nothing reads at once.
        residency: device pages of each request.
        kv_io: reads and writes of tokens.
        loader: makes pages resident.
        staging: device memory that prefixes stream through.
    """

    def __init__(
        self,
        host: HostKVPool,
        sizes: PoolSizes,
        device: torch.device,
        heads: int,
        counters: Counters,
        *,
        checked: bool,
        aside: SideStream | None = None,
    ) -> None:
        self.host = host
        self.device = pool = DevicePool(
            host.kv,
            heads=heads,
            num_slots=sizes.num_slots,
            num_pages=sizes.device_pages,
            max_row_pages=sizes.max_row_pages,
            context_pages=sizes.context_pages,
            device=device,
        )
        capacities = RowCapacities(
            total_pages=pool.free_pages.shape[1],
            rows_per_request=heads,
            min_pages=sizes.min_row_pages,
            max_pages=sizes.max_row_pages,
            max_requests=sizes.num_slots - 1,
            num_slots=sizes.num_slots,
        )
        self.counters, self.checked = counters, checked
        self.aside = make_stream(device) if aside is None else aside
        self.residency = Residency(pool, capacities, checked=checked)
        self.kv_io = KVReadWrite(host, pool, checked=checked)
        self.staging = Staging(host, sizes.staging_pages, device)
        self.loader = SwapIn(host, pool, counters, self.aside, checked=checked)

    @property
    def tensors(self) -> list[Tensor]:
        """What lasts as long as the manager: pools, tables and counters of all layers."""
        pools, layers = (self.host, self.device), range(self.host.kv.num_layers)
        stored = [x for pool in pools for layer in layers for x in pool.stored(layer).tensors]
        tables = [x for x in self.device.states if x is not None]
        return [*stored, *tables, self.counters.selected]

    def start_forward(self, slots: np.ndarray, needs: np.ndarray) -> None:
        """Apply resets and capacity changes; see :meth:`Residency.start_forward`."""
        # An earlier forward may have ended by an exception.
        self.end_forward()
        self.residency.start_forward(slots, needs)

    def end_forward(self) -> None:
        """Let the forward stream wait for all side work."""
        self.aside.join_all()
