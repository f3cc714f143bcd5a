"""The device tables of some rows at one time, and the way back to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.cache.device_pool import DevicePool
from hisparse.cache.host_pool import HostKVPool
from hisparse.cache.kv_io import move_pages


@dataclass(frozen=True)
class RowSnapshot:
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

    def take(self, index: Tensor) -> RowSnapshot:
        """The rows ``index [n] int64`` of the snapshot."""
        return RowSnapshot(
            self.rows[index],
            self.slot_pages[index],
            self.lru_order[index],
            self.device_pages[index],
            self.tail_pages[index],
        )


def save_rows(device: DevicePool, layer_id: int, rows: Tensor, width: int) -> RowSnapshot:
    """Copy the tables of ``rows [R] int64``.

    Args:
        device: the device pages and the rows' tables.
        layer_id: layer number.
        rows: state rows.
        width: W, at least the capacity of every row.
    """
    state = device.state(layer_id)
    held, order, pages = (table[rows, :width] for table in state[:3])
    return RowSnapshot(rows, held, order, pages, device.tail_pages[layer_id, rows])


def restore_rows(device: DevicePool, layer_id: int, saved: RowSnapshot) -> None:
    """Write a snapshot back to the tables, which the rows' capacities still allow.

    The device pages keep their K and V; see :func:`read_changed`.
    """
    state, rows = device.state(layer_id), saved.rows
    width = saved.slot_pages.shape[1]
    state.slot_pages[rows, :width] = saved.slot_pages
    state.lru_order[rows, :width] = saved.lru_order
    state.device_pages[rows, :width] = saved.device_pages
    device.tail_pages[layer_id, rows] = saved.tail_pages
    if state.page_slots is not None:
        row, slot = torch.nonzero(saved.slot_pages >= 0, as_tuple=True)
        state.page_slots[rows[row], saved.slot_pages[row, slot].long()] = slot.to(torch.int32)


def read_changed(
    host: HostKVPool,
    device: DevicePool,
    layer_id: int,
    before: RowSnapshot,
    *,
    host_page_table: Tensor,
    tail_index: Tensor,
) -> None:
    """Read pages from host memory that rows have by their tables, but not in device memory.

    Args:
        host: the whole KV cache.
        device: the device pages and the rows' tables.
        layer_id: layer number.
        before: the tables that tell what the device pages hold.
        host_page_table: ``[B, P] int32``, host pages of the rows' requests.
        tail_index: ``[B] int32``, index of the tail page; -1: it is empty, or where it was.
    """
    heads = device.heads
    now = save_rows(device, layer_id, before.rows, before.slot_pages.shape[1])
    tail_index = tail_index.repeat_interleave(heads)[:, None]
    lost = now.slot_pages != before.slot_pages
    lost |= now.device_pages != before.device_pages
    wanted = torch.cat([now.slot_pages.where(lost, -1), tail_index], 1)
    table = host_page_table.repeat_interleave(heads, 0)
    source = table.gather(1, wanted.clamp(min=0).long()).where(wanted >= 0, -1)
    target = torch.cat([now.device_pages, now.tail_pages[:, None]], 1).where(wanted >= 0, -1)
    move_pages(host.stored(layer_id), source, device.stored(layer_id), target, heads=heads)
