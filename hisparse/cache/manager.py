"""Where every page is: host pool, device pages, and what moves between them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from hisparse.batch import DecodeStep
from hisparse.cache.capacity import CapacityPlanner
from hisparse.cache.checking import check_resident, check_selection
from hisparse.cache.device_buffer import DeviceBuffer
from hisparse.cache.host_pool import HostKVPool
from hisparse.kernels import (
    LruDiff,
    gather_pages,
    gather_tokens,
    lru_diff,
    page_table,
    promote_tail,
    rebalance,
    reset_rows,
    scatter_tokens,
)
from hisparse.kernels.cuda_checks import set_checked
from hisparse.metrics import CacheCounters
from hisparse.types import PagedKV, Selection

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
    ) -> None:
        self._checked = checked
        set_checked(checked)
        self.host = host
        self.device = device
        self.planner = planner
        self.counters = counters
        self.staging_pages = staging_pages
        self._staging = self._make_staging()
        staged = torch.arange(staging_pages, dtype=torch.int32)
        # By where a list of pages lies: on the host, or with the rows.
        self._staged = {"cpu": staged, self._where.type: staged.to(self._where)}
        num_slots = device.capacity.shape[0] // device.heads
        self._needs, self._settled, self._capacity = np.zeros((3, num_slots), dtype=np.int64)
        self._resets: set[int] = set()
        self._cold: set[int] = set()

    @property
    def _where(self) -> torch.device:
        return self.device.capacity.device

    def _make_staging(self) -> PagedKV:
        kv = self.host.kv
        shape = (self.staging_pages, kv.page_size, kv.num_kv_heads)

        def tile(width: int) -> Tensor:
            return torch.zeros(*shape, width, dtype=kv.dtype, device=self._where).transpose(1, 2)

        k = tile(kv.head_dim)
        return PagedKV(k, k[..., : kv.v_head_dim] if kv.latent else tile(kv.v_head_dim))

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging tile."""
        return self.staging_pages * self.host.kv.page_size * self.host.kv.token_bytes_per_layer

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
        self._needs[slots] = needs
        if self._resets:
            rows = self._state_rows(sorted(self._resets))
            reset_rows(rows, self.device.capacity, self.device.states)
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
        scatter_tokens(k, v, self.host.layer(layer_id), host_slots)

    def append_tail(self, layer_id: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put each request's new token into its rows' tail pages.

        Args:
            layer_id: layer number.
            slots: ``[R] int64``, device page of the row's tail times S, plus the offset in it.
            k, v: ``[B, Hkv, D]``.
        """
        if self.device.heads > 1:
            copies = self.device.heads // k.shape[1]
            if copies > 1:
                k, v = k.repeat_interleave(copies, dim=1), v.repeat_interleave(copies, dim=1)
            k, v = k.flatten(0, 1)[:, None], v.flatten(0, 1)[:, None]
        scatter_tokens(k, v, self.device.layer(layer_id), slots)

    def tail_pages(self, layer_id: int, step: DecodeStep) -> PagedKV:
        """K and V of the tail pages, each ``[B, Hkv, S, D]``."""
        rows = step.tail_pages[layer_id].long()
        k, v = (pages[rows] for pages in self.device.layer(layer_id))
        if step.policy.heads > 1:
            kv_heads = step.policy.kv.num_kv_heads
            copies = step.policy.heads // kv_heads
            k, v = (x.unflatten(0, (-1, kv_heads, copies))[:, :, 0, 0] for x in (k, v))
        return PagedKV(k, v)

    def host_pages(self, layer_id: int) -> PagedKV:
        """K and V of the host pool, each ``[host pages, Hkv, S, D]``."""
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

    def swap_in(self, layer_id: int, selection: Selection, step: DecodeStep) -> Tensor:
        """Make the selected pages resident.

        Returns:
            ``[R, K + 1] int32``, the device page of each selected page, and right after the last
            of them the row's tail page; -1 from there on.
        """
        if self._checked:
            check_selection(layer_id, selection, step)
        pages = selection.pages.reshape(step.rows.numel(), -1)
        diff = self._load(
            layer_id,
            pages,
            step.rows,
            step.host_page_table,
            step.capacity,
            step.num_real_rows,
            self.host.layer(layer_id),
        )
        table = page_table(
            self.device.state(layer_id).device_pages,
            step.rows,
            diff.curr_device_slots,
            selection.lengths.flatten(),
            step.tail_pages[layer_id],
        )
        self.counters.count_selection(diff.num_hits, diff.num_misses)
        if self._checked:
            check_resident(layer_id, selection, table[:, :-1], step, self.host, self.device)
        return table

    def _load(
        self,
        layer_id: int,
        pages: Tensor,
        rows: Tensor,
        source_table: Tensor,
        capacity: Tensor,
        num_real_rows: Tensor,
        source: PagedKV,
    ) -> LruDiff:
        state = self.device.state(layer_id)
        diff = lru_diff(pages, source_table, capacity, num_real_rows, state, rows=rows)
        gather_pages(
            source,
            diff.load_host_pages,
            self.device.layer(layer_id),
            page_table(state.device_pages, rows, diff.load_device_slots),
            heads=self.device.heads,
        )
        return diff

    def place(
        self, layer_id: int, slot: int, first: int, last: int, source: PagedKV, table: Tensor
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
        real = torch.tensor([heads], dtype=torch.int32, device=self._where)
        self._load(
            layer_id,
            pages.expand(heads, -1).contiguous(),
            rows,
            table[None],
            self.device.capacity[rows],
            real,
            source,
        )

    def write_tail(self, layer_id: int, slot: int, k: Tensor, v: Tensor) -> None:
        """Fill the first tokens of a request's tail pages: ``k, v [t, Hkv, D]``, t < S."""
        heads = self.device.heads
        rows = slice(slot * heads, (slot + 1) * heads)
        pages = self.device.tail_pages[layer_id, rows].long()
        for pages_kv, new in zip(self.device.layer(layer_id), (k, v), strict=True):
            by_head = new.transpose(0, 1)
            if heads == 1:
                pages_kv[pages, :, : new.shape[0]] = by_head[None]
            else:
                by_head = by_head.repeat_interleave(heads // new.shape[1], dim=0)
                pages_kv[pages, :, : new.shape[0]] = by_head[:, None]

    def read_tokens(self, layer_id: int, host_slots: Tensor) -> tuple[Tensor, Tensor]:
        """K and V at ``host_slots [T]``, each ``[T, Hkv, D]`` on the device."""
        k, v = gather_tokens(self.host.layer(layer_id), host_slots)
        return k.to(self._where), v.to(self._where)

    def read_prefix(self, layer_id: int, host_pages: Tensor) -> PagedKV:
        """Bring host pages into the staging tile, in order.

        Args:
            layer_id: layer number.
            host_pages: ``[P] int32``, at most ``staging_pages`` of them; on the host if it knows
                them, which lets the copy engine move them.

        Returns:
            ``[P, Hkv, S, D]`` views of the tile, valid until the next call.
        """
        count = host_pages.numel()
        gather_pages(
            self.host.layer(layer_id),
            host_pages[None],
            self._staging,
            self._staged[host_pages.device.type][None, :count],
        )
        return PagedKV(self._staging.k[:count], self._staging.v[:count])
