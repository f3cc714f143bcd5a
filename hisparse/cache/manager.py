"""Where every page is: host pool, device pages, and what moves between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from hisparse.cache.capacity import CapacityPlanner
from hisparse.cache.checking import check_resident, check_selection
from hisparse.cache.codec import decode, encode, move_pages, read_tokens, write_tokens
from hisparse.cache.counters import CacheCounters
from hisparse.cache.device_pool import DeviceBuffer
from hisparse.cache.host_pool import HostKVPool
from hisparse.cache.last_pages import LastPages
from hisparse.cache.staging import Staging, Tile
from hisparse.cache.streams import Done, InlineStreams, Started
from hisparse.cache.swap import Overlap, SwapIn, When
from hisparse.engine.step import DecodeStep
from hisparse.errors import HiSparseError
from hisparse.kernels import (
    LruDiff,
    lru_diff,
    page_table,
    promote_tail,
    rebalance,
    reset_rows,
)
from hisparse.kernels.cuda.checks import set_checked
from hisparse.types import PagedKV, Selection, StoredKV

__all__ = ["SparseKVCacheManager"]


class SparseKVCacheManager:
    """Keeps a working set of each request's pages on the device.

    Args:
        host: the whole KV cache.
        device: the device pages and the rows' tables.
        planner: decides the capacity of each row, on the host.
        staging_pages: host pages that fit one staging tile.
        counters: what the cache did.
        checked: verify selections and resident bytes in every step.
        overlap: how transfers run beside compute; None: they do not.

    Attributes:
        streams: what runs beside the forward stream.
        overlaps: whether anything does.
        last_pages: which pages are resident whatever else runs; None if attention is not split.
    """

    def __init__(
        self,
        host: HostKVPool,
        device: DeviceBuffer,
        planner: CapacityPlanner,
        *,
        staging_pages: int,
        counters: CacheCounters,
        checked: bool = False,
        overlap: Overlap | None = None,
    ) -> None:
        self._checked = checked
        set_checked(checked)
        self.host = host
        self.device = device
        self.planner = planner
        self.counters = counters
        self.staging_pages = staging_pages
        self.streams = InlineStreams() if overlap is None else overlap.streams
        self.overlaps = overlap is not None
        num_buffers = 2 if self.overlaps else 1
        self._staging = Staging(host, staging_pages, num_buffers, self._where, self.streams)
        num_rows = device.capacity.shape[0]
        self.last_pages = (
            None
            if overlap is None or overlap.split_pages is None
            else LastPages(host.kv.num_layers, num_rows, overlap.split_pages, self._where)
        )
        self._prefetched: list[Started[LruDiff]] = []
        num_slots = num_rows // device.heads
        self._needs, self._settled, self._capacity = np.zeros((3, num_slots), dtype=np.int64)
        self._resets: set[int] = set()
        self._cold: set[int] = set()

    @property
    def _where(self) -> torch.device:
        return self.device.capacity.device

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging, all tiles."""
        return self._staging.num_bytes

    @property
    def table_bytes(self) -> int:
        """Bytes of all tables of the rows."""
        return self.device.table_bytes + (self.last_pages.num_bytes if self.last_pages else 0)

    # Requests come and go at schedule time, while an earlier forward may still be running: the
    # tables are changed only at the start of the next forward, on its stream.

    def begin(self, slot: int) -> None:
        """A request takes over a request slot; what the slot's rows hold is not its own."""
        self._resets.add(slot)
        self._needs[slot] = 0
        self._cold.add(slot)
        self.planner.begin(slot)

    def is_cold(self, slot: int) -> bool:
        """Whether a request has not been through a prefill yet: nothing of it is resident."""
        return slot in self._cold

    def warmed(self, slots: Iterable[int]) -> None:
        """A prefill of these requests is done."""
        self._cold.difference_update(slots)

    def end(self, slot: int) -> None:
        """A request is over; its device pages go back to the pool at the next forward."""
        self.planner.end(slot)

    def capacities(self, slots: np.ndarray) -> np.ndarray:
        """Device pages that each row of the request slots ``[B]`` holds, ``[B]``."""
        held: np.ndarray = self._capacity[slots]
        return held

    @property
    def is_checked(self) -> bool:
        """Whether selections and resident bytes are verified, which waits for the device."""
        return self._checked

    def start_forward(self, slots: np.ndarray, needs: np.ndarray) -> None:
        """Forget what reset rows held and fit the rows' capacities to what runs.

        Args:
            slots: ``[B]``, request slots of this forward.
            needs: ``[B]``, full pages that each one's context has after it.
        """
        # What a forward that was given up has left behind.
        self.end_forward()
        self._needs[slots] = needs
        if self._resets:
            rows = self._state_rows(sorted(self._resets))
            reset_rows(rows, self.device.capacity, self.device.states)
            if self.last_pages is not None:
                self.last_pages.forget(rows)
            self._resets.clear()
        if not self.planner.pending and (needs <= self._settled[slots]).all():
            return
        live = self.planner.live
        changes = self.planner.plan({slot: int(self._needs[slot]) for slot in live})
        self._settled[list(live)] = [self.planner.settled_need(slot) for slot in live]
        if changes:
            self._capacity[[slot for slot, _ in changes]] = [new for _, new in changes]
            heads = self.device.heads
            rows = self._state_rows([slot for slot, _ in changes])
            capacity = torch.tensor([new for _, new in changes], dtype=torch.int32)
            rebalance(
                rows,
                capacity.repeat_interleave(heads).to(self._where),
                self.device.capacity,
                self.device.states,
                self.device.free_pages,
                self.device.num_free,
            )

    def _state_rows(self, slots: list[int]) -> Tensor:
        heads = self.device.heads
        rows = [slot * heads + head for slot in slots for head in range(heads)]
        return torch.tensor(rows, dtype=torch.int64, device=self._where)

    def write(self, layer_id: int, host_slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write new tokens through to host memory: ``host_slots [T]``, ``k, v [T, Hkv, D]``."""
        write_tokens(encode(self.host.kv, k, v), self.host.stored(layer_id), host_slots)

    def append(
        self, layer_id: int, tail_slots: Tensor, host_slots: Tensor, k: Tensor, v: Tensor
    ) -> None:
        """Put each request's new token into its rows' tail pages, and write it through.

        Args:
            layer_id: layer number.
            tail_slots: ``[R] int64``, device page of the row's tail times S, plus the offset in it.
            host_slots: ``[B] int64``.
            k, v: ``[B, Hkv, D]``.
        """
        new, heads = encode(self.host.kv, k, v), self.device.heads
        write_tokens(new, self.host.stored(layer_id), host_slots)
        if heads > 1:
            new = StoredKV(*(_by_row(x, heads) for x in new.tensors))
        write_tokens(new, self.device.stored(layer_id), tail_slots)

    def tail_pages(self, layer_id: int, step: DecodeStep) -> PagedKV:
        """K and V of the tail pages, each ``[B, Hkv, S, D]``, in the model's dtype."""
        rows = step.tail_pages[layer_id].long()
        tails = StoredKV(*(pages[rows] for pages in self.device.stored(layer_id).tensors))
        k, v = decode(self.host.kv, tails)
        if step.policy.heads > 1:
            kv_heads = step.policy.kv.num_kv_heads
            copies = step.policy.heads // kv_heads
            k, v = (x.unflatten(0, (-1, kv_heads, copies))[:, :, 0, 0] for x in (k, v))
        return PagedKV(k, v)

    def host_pages(self, layer_id: int) -> PagedKV:
        """K and V of the host pool, each ``[host pages, Hkv, S, D]``.

        Raises:
            HiSparseError: they are in eight bits, which algorithms do not read.
        """
        if self.host.kv.fp8:
            raise HiSparseError(
                "an algorithm reads keys in host memory, which are fp8; expected it to say so "
                "(reads_host_keys = True), or kv_cache_dtype 'auto'"
            )
        return self.host.layer(layer_id)

    def promote_tail(self, layer_id: int, step: DecodeStep, filled: Tensor) -> None:
        """Let the tail pages of the rows ``filled [R] bool`` enter the LRU as hottest."""
        heads = step.policy.heads
        promote_tail(
            step.rows,
            step.num_pages.repeat_interleave(heads),
            filled,
            step.capacity,
            self.device.state(layer_id),
            self.device.tail_pages[layer_id],
        )

    def begin_swap_in(
        self, layer_id: int, selection: Selection, step: DecodeStep, when: When
    ) -> SwapIn:
        """Start to make the selected pages resident; :meth:`end_swap_in` has to follow.

        Args:
            layer_id: layer number.
            selection: the pages.
            step: the step.
            when: on which stream.
        """
        if self._checked:
            check_selection(layer_id, selection, step)
        if when == "ahead":
            find_and_load = self._loading(layer_id, selection, step)
            return SwapIn(self.streams.start("read", find_and_load), Done(None))
        host, rows = self.host.stored(layer_id), step.rows
        diff = self._diff(layer_id, selection.pages, step)
        streams = self.streams if when == "beside" else InlineStreams()
        loaded = streams.start("read", lambda: self._gather(layer_id, rows, diff, host))
        return SwapIn(Done(diff), loaded)

    def end_swap_in(
        self, layer_id: int, selection: Selection, step: DecodeStep, swap: SwapIn
    ) -> LruDiff:
        """Let what follows find the selected pages resident."""
        diff = swap.diff.join()
        swap.loaded.join()
        self.counters.count_selection(diff.num_hits, diff.num_misses)
        if self._checked:
            slots, lengths = diff.curr_device_slots, selection.lengths.flatten()
            table = self.device_table(layer_id, slots, lengths, step)
            check_resident(layer_id, selection, table[:, :-1], step, self.host, self.device)
        return diff

    def device_table(
        self, layer_id: int, slots: Tensor, lengths: Tensor, step: DecodeStep
    ) -> Tensor:
        """The device pages of slots ``[R, K]``, and after ``lengths [R]`` of them the tail page.

        Returns:
            ``[R, K + 1] int32``, -1 where there is no page.
        """
        device_pages = self.device.state(layer_id).device_pages
        return page_table(device_pages, step.rows, slots, lengths, step.tail_pages[layer_id])

    def prefetch(self, layer_id: int, selection: Selection, step: DecodeStep) -> Started[LruDiff]:
        """Make pages resident that a layer is likely to attend, until the forward ends.

        Args:
            layer_id: layer number; it has attended, or has not begun.
            selection: its pages: of the next step, the tail page that this step filled among them
                once it is promoted, or of this one.
            step: this step.

        Returns:
            to be joined before the layer attends in this step.
        """
        loading = self._loading(layer_id, selection, step)
        prefetched = self.streams.start("ahead", loading)
        self._prefetched.append(prefetched)
        if self.last_pages is not None:
            everyone = torch.ones_like(step.rows, dtype=torch.bool)
            self.last_pages.remember(layer_id, selection, step, everyone)
        return prefetched

    def end_forward(self) -> None:
        """Whatever was started beside the forward stream is over before what follows."""
        for prefetched in self._prefetched:
            self.counters.count_prefetched(prefetched.join().num_misses)
        self._prefetched.clear()
        self._staging.forget()
        self.streams.join_all()

    def _loading(
        self, layer_id: int, selection: Selection, step: DecodeStep
    ) -> Callable[[], LruDiff]:
        """What finds and brings in the selected pages."""
        host = self.host.stored(layer_id)

        def find_and_load() -> LruDiff:
            diff = self._diff(layer_id, selection.pages, step)
            self._gather(layer_id, step.rows, diff, host)
            return diff

        return find_and_load

    def _diff(self, layer_id: int, pages: Tensor, step: DecodeStep) -> LruDiff:
        return lru_diff(
            pages.reshape(step.rows.numel(), -1),
            step.host_page_table,
            step.capacity,
            step.num_real_rows,
            self.device.state(layer_id),
            rows=step.rows,
        )

    def _gather(self, layer_id: int, rows: Tensor, diff: LruDiff, source: StoredKV) -> None:
        move_pages(
            source,
            diff.load_host_pages,
            self.device.stored(layer_id),
            page_table(self.device.state(layer_id).device_pages, rows, diff.load_device_slots),
            heads=self.device.heads,
        )

    def place(
        self, layer_id: int, slot: int, first: int, last: int, source: StoredKV, table: Tensor
    ) -> None:
        """Make pages ``first`` to ``last - 1`` of a request resident, the last one hottest.

        Args:
            layer_id: layer number.
            slot: request slot; its rows' capacity is at least ``last - first``.
            first, last: page indices; the pages are not resident yet.
            source: where the pages are read from.
            table: ``[last] int32``, page of ``source`` for each page index.
        """
        heads = self.device.heads
        rows = torch.arange(slot * heads, (slot + 1) * heads, device=self._where)
        pages = torch.arange(first, last, dtype=torch.int32, device=self._where)
        # Filled in there: a copy from the host would wait for it.
        real = torch.full((1,), heads, dtype=torch.int32, device=self._where)
        diff = lru_diff(
            pages.expand(heads, -1).contiguous(),
            table[None],
            self.device.capacity[rows],
            real,
            self.device.state(layer_id),
            rows=rows,
        )
        self._gather(layer_id, rows, diff, source)

    def write_tail(self, layer_id: int, slot: int, k: Tensor, v: Tensor) -> None:
        """Fill the first tokens of a request's tail pages: ``k, v [t, Hkv, D]``, t < S."""
        heads = self.device.heads
        rows = slice(slot * heads, (slot + 1) * heads)
        pages = self.device.tail_pages[layer_id, rows].long()
        tails = self.device.stored(layer_id).tensors
        for pages_kv, new in zip(tails, encode(self.host.kv, k, v).tensors, strict=True):
            by_head = new.transpose(0, 1)
            if heads == 1:
                pages_kv[pages, :, : new.shape[0]] = by_head[None]
            else:
                by_head = by_head.repeat_interleave(heads // new.shape[1], dim=0)
                pages_kv[pages, :, : new.shape[0]] = by_head[:, None]

    def read_tokens(self, layer_id: int, host_slots: Tensor) -> tuple[Tensor, Tensor]:
        """K and V at ``host_slots [T]``, each ``[T, Hkv, D]`` on the device."""
        return decode(self.host.kv, self.read_stored(layer_id, host_slots))

    def read_stored(self, layer_id: int, host_slots: Tensor) -> StoredKV:
        """What is stored at ``host_slots [T]``, ``[T, Hkv, D]`` on the device."""
        stored = read_tokens(self.host.stored(layer_id), host_slots)
        return StoredKV(*(x.to(self._where) for x in stored.tensors))

    def read_prefix(self, tile: Tile, ahead: Tile | None = None) -> PagedKV:
        """Bring host pages into staging; see :meth:`Staging.read`."""
        return self._staging.read(tile, ahead)


def _by_row(tokens: Tensor, heads: int) -> Tensor:
    """``[B, Hkv, D]`` -> ``[B * heads, 1, D]``: each row's own KV head."""
    copies = heads // tokens.shape[1]
    each = tokens if copies == 1 else tokens.repeat_interleave(copies, dim=1)
    return each.flatten(0, 1)[:, None]
