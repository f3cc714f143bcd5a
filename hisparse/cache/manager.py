"""Manages every page: host pool, device pages, and the transfers between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from hisparse.algorithms import DecodeStep
from hisparse.cache.counters import Counters
from hisparse.cache.device_pool import DevicePool
from hisparse.cache.host_pool import HostKVPool
from hisparse.cache.kv_io import KVReadWrite
from hisparse.cache.residency import Residency, RowCapacities
from hisparse.cache.staging import Staging
from hisparse.cache.streams import SideStreams
from hisparse.cache.swap_in import PageTable, SwapIn, Wanted
from hisparse.kernels import TailPools, promote_tail
from hisparse.types import Selection


class SparseKVCacheManager:
    """Keeps a working set of each request's pages on the device.

    A decode layer makes three calls: :meth:`append` the new token, :meth:`swap_in` the selected
    pages, :meth:`finish` the full tail pages.

    Args:
        host: the whole KV cache.
        device: the device pages and the rows' tables.
        capacities: decides the capacity of each row, on the host.
        staging_pages: host pages that fit one staging tile.
        counters: totals of hits, misses and bytes.
        checked: verify selections and resident bytes in every step; waits for the device.
        streams: side streams for transfers; None: transfers do not overlap with compute.

    Attributes:
        host, device, counters, staging_pages, checked: as given.
        streams: side streams, or their inline replacement.
        overlaps: whether transfers overlap with compute.
        residency: device pages of each request.
        kv_io: reads and writes of tokens.
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
        self._staging = Staging(
            host, staging_pages, 2 if self.overlaps else 1, device.device, self.streams
        )
        self._swap_in = SwapIn(
            host, device, self.streams, counters, checked=checked, overlaps=self.overlaps
        )
        #: See :meth:`Staging.read`.
        self.read_prefix = self._staging.read
        #: See :meth:`SwapIn.prefetch`.
        self.prefetch = self._swap_in.prefetch
        #: See :meth:`SwapIn.place`.
        self.place = self._swap_in.place
        #: See :meth:`SwapIn.logged` and :meth:`SwapIn.replay`.
        self.logged, self.replay = self._swap_in.logged, self._swap_in.replay

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging, all tiles."""
        return self._staging.num_bytes

    def start_forward(self, slots: np.ndarray, needs: np.ndarray) -> None:
        """Apply resets and capacity changes; see :meth:`Residency.start_forward`."""
        # An earlier forward may have ended by an exception.
        self.end_forward()
        self.residency.start_forward(slots, needs)

    def end_forward(self) -> None:
        """Let the forward stream wait for all side work."""
        self._swap_in.join()
        if self.overlaps:
            self._staging.discard_next()
            self.streams.join_all()

    def append(
        self, layer_id: int, tail_slots: Tensor, host_slots: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """Write each request's new token to its tail pages and to its host slot.

        Args:
            layer_id: layer number.
            tail_slots: ``[R] int64``, device page of the row's tail times S, plus the offset in it.
            host_slots: ``[B] int64``.
            k, v: ``[B, Hkv, D]``.
        """
        self.kv_io.append(layer_id, tail_slots, host_slots, k, v)

    def swap_in(
        self,
        layer_id: int,
        step: DecodeStep,
        selection: Selection | None,
        *,
        width: int | None = None,
        tail_below: int | None = None,
        followers: Sequence[int] = (),
    ) -> PageTable:
        """Make the selected pages resident, and return their device pages.

        Args:
            layer_id: layer number.
            step: the requests that attend; its dense requests attend every page.
            selection: the selected pages; None: every page of every request.
            width: the most pages of a request; None: those of the selection.
            tail_below: the tail page is attended beside fewer pages than this; None: always.
            followers: later layers that share the selection. With overlap, their transfers start
                here, after those of this layer.
        """
        wanted = Wanted(step, selection, width, tail_below)
        return self._swap_in.swap_in(layer_id, wanted, followers)

    def finish(
        self, layer_id: int, step: DecodeStep, filled: Tensor, *, with_values: bool
    ) -> tuple[Tensor, ...]:
        """Move full tail pages into the LRU, as the hottest pages.

        Args:
            layer_id: layer number.
            step: the requests that decode.
            filled: ``[R] bool``, rows with a full tail page.
            with_values: whether to return values too.

        Returns:
            K, or K and V, of the full tail pages, each ``[B, Hkv, S, D]``; the entries of other
            requests mean nothing.
        """
        form, tails = self.host.format, None
        pools = form.split(self.device.stored(layer_id))
        if form.encoded:
            # Kernels copy tail pages as they are; these have to be decoded.
            pools, tails = (), self.kv_io.read_tails(layer_id, step)
        k, v = (*pools, None, None)[:2]
        copies = promote_tail(
            step.rows,
            step.num_pages,
            filled,
            step.capacity,
            self.device.state(layer_id),
            self.device.tail_pages[layer_id],
            pools=TailPools(k, v if with_values else None, self.host.kv.num_kv_heads),
        )
        if tails is not None:
            return tails if with_values else tails[:1]
        return form.join(copies).kv if with_values else copies
