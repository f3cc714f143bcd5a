"""Manages every page: host pool, device pages, and the transfers between them."""

from __future__ import annotations

import numpy as np

from hisparse.cache.counters import Counters
from hisparse.cache.device_pool import DevicePool
from hisparse.cache.host_pool import HostKVPool
from hisparse.cache.kv_io import KVReadWrite
from hisparse.cache.residency import Residency, RowCapacities
from hisparse.cache.staging import Staging
from hisparse.cache.streams import SideStreams
from hisparse.cache.swap_in import SwapIn


class SparseKVCacheManager:
    """Keeps a working set of each request's pages on the device.

    A decode layer makes three calls: ``kv_io.append`` writes the new token, ``loader.swap_in``
    makes the selected pages resident, and ``kv_io.promote_tails`` moves full tail pages into the
    LRU.

    Args:
        host: the whole KV cache.
        device: the device pages and the rows' tables.
        capacities: decides the capacity of each row, on the host.
        staging_pages: host pages that fit one staging tile.
        counters: totals of hits, misses and bytes.
        checked: verify selections and resident bytes in every step; waits for the device.
        streams: side streams for transfers, or None if they do not overlap with compute.

    Attributes:
        host, device, counters, staging_pages, checked: as given.
        streams: side streams, or their inline replacement.
        overlaps: whether transfers overlap with compute.
        residency: device pages of each request.
        kv_io: reads and writes of tokens.
        loader: makes pages resident.
        staging: device memory that prefixes stream through.
    """

    def __init__(
        self,
        host: HostKVPool,
        device: DevicePool,
        capacities: RowCapacities,
        *,
        staging_pages: int,
        counters: Counters,
        checked: bool = False,
        streams: SideStreams | None = None,
    ) -> None:
        self.host = host
        self.device = device
        self.counters = counters
        self.staging_pages = staging_pages
        self.checked = checked
        self.overlaps = streams is not None
        self.streams = SideStreams() if streams is None else streams
        self.residency = Residency(device, capacities, checked=checked)
        self.kv_io = KVReadWrite(host, device, checked=checked)
        self.staging = Staging(
            host, staging_pages, 2 if self.overlaps else 1, device.device, self.streams
        )
        self.loader = SwapIn(
            host, device, self.streams, counters, checked=checked, overlaps=self.overlaps
        )

    def start_forward(self, slots: np.ndarray, needs: np.ndarray) -> None:
        """Apply resets and capacity changes; see :meth:`Residency.start_forward`."""
        # An earlier forward may have ended by an exception.
        self.end_forward()
        self.residency.start_forward(slots, needs)

    def end_forward(self) -> None:
        """Let the forward stream wait for all side work."""
        if self.overlaps:
            self.staging.discard_next()
            self.streams.join_all()
