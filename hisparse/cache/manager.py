"""Manages every page: host pool, device pages, and the transfers between them."""

import numpy as np
import torch
from torch import Tensor

from hisparse.cache.counters import Counters
from hisparse.cache.device_pool import DevicePool, PoolSizes
from hisparse.cache.host_pool import HostKVPool
from hisparse.cache.kv_io import KVReadWrite
from hisparse.cache.residency import Residency, RowCapacities
from hisparse.cache.staging import Staging
from hisparse.cache.streams import SideStream, make_stream
from hisparse.cache.swap_in import SwapIn


class SparseKVCacheManager:
    """Keeps a working set of each request's pages on the device.

    A decode layer makes three calls: ``kv_io.append`` writes the new token, ``loader.swap_in``
    makes the selected pages resident, and ``kv_io.promote_tails`` moves full tail pages into the
    LRU.

    Args:
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
        self.device = pool = DevicePool(host.kv, heads, sizes, device)
        capacities = RowCapacities(heads, sizes)
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
        return [*stored, *tables, self.device.tail_pages, self.counters.selected]

    def start_forward(self, slots: np.ndarray, needs: np.ndarray) -> None:
        """Apply resets and capacity changes; see :meth:`Residency.start_forward`."""
        # An earlier forward may have ended by an exception.
        self.end_forward()
        self.residency.start_forward(slots, needs)

    def end_forward(self) -> None:
        """Let the forward stream wait for all side work."""
        self.aside.join_all()
