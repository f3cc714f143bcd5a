"""Attention over selected pages, all at once or in two parts while some of them arrive."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.adapters import Attended, BackendAdapter, merge_attended
from hisparse.cache import SparseKVCacheManager, SwapIn
from hisparse.cache.last_pages import LastPages
from hisparse.engine.step import DecodeStep, SelectionPolicy
from hisparse.types import Selection

__all__ = ["SelectedAttention"]


class SelectedAttention:
    """Attends over selected pages that are on their way to the device.

    Args:
        policy: shapes of the model.
        manager: brings them in.
        adapter: attends.
    """

    def __init__(
        self, policy: SelectionPolicy, manager: SparseKVCacheManager, adapter: BackendAdapter
    ) -> None:
        self._policy = policy
        self._manager = manager
        self._adapter = adapter

    def at_once(
        self,
        layer_id: int,
        q: Tensor,
        selection: Selection,
        step: DecodeStep,
        tail_lens: Tensor,
        swap: SwapIn,
    ) -> Attended:
        """Over all of them, once they are there.

        Args:
            layer_id: layer number.
            q: ``[R, Q, D]``.
            selection: the pages.
            step: the step.
            tail_lens: ``[R] int32``, tokens of the tail page to attend.
            swap: of the pages.
        """
        diff = self._manager.end_swap_in(layer_id, selection, step, swap)
        lengths = selection.lengths.flatten()
        slots = diff.curr_device_slots
        return self._attend(layer_id, q, slots, lengths, step, tail_lens)

    def in_parts(
        self,
        layer_id: int,
        q: Tensor,
        selection: Selection,
        step: DecodeStep,
        tail_lens: Tensor,
        swap: SwapIn,
        last_pages: LastPages,
        who: Tensor,
    ) -> Attended:
        """Over the row's last pages while the others arrive, then over those and the tail page.

        Args:
            layer_id, q, selection, step, tail_lens: as :meth:`at_once`.
            swap: of the pages; its difference is made.
            last_pages: of the rows; those of this step from here on.
            who: ``[R] bool``; of the other rows all pages are in the second part.
        """
        slots = swap.diff.join().curr_device_slots
        is_first = last_pages.find(layer_id, selection, step) & who[:, None]
        last_pages.remember(layer_id, selection, step, who)
        slots, num_first = _in_front(slots, is_first)
        first = self._attend(layer_id, q, slots, num_first, step, torch.zeros_like(tail_lens))
        self._manager.end_swap_in(layer_id, selection, step, swap)
        entry = torch.arange(slots.shape[1], device=slots.device) + num_first[:, None]
        others = slots.gather(1, entry.clamp(max=slots.shape[1] - 1))
        num_others = selection.lengths.flatten() - num_first
        second = self._attend(layer_id, q, others, num_others, step, tail_lens)
        return merge_attended(first, second)

    def _attend(
        self,
        layer_id: int,
        q: Tensor,
        slots: Tensor,
        lengths: Tensor,
        step: DecodeStep,
        tail_lens: Tensor,
    ) -> Attended:
        """Over the pages in the first ``lengths [R]`` of ``slots [R, K]``, then the tail page."""
        table = self._manager.device_table(layer_id, slots, lengths, step)
        # All pages are full but the last one, the tail.
        seq_lens = torch.add(tail_lens, lengths, alpha=self._policy.kv.page_size)
        kv, scale = self._manager.device.stored(layer_id), self._policy.scale
        if kv.scales is not None:
            return self._adapter.attend_fp8(q, kv, table, seq_lens, scale)
        return self._adapter.attend(q, kv.kv, table, seq_lens, scale)


def _in_front(slots: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """``slots [R, K]`` with those that are ``chosen [R, K]`` in front, and how many they are."""
    entry = torch.arange(slots.shape[1], device=slots.device)
    count = chosen.cumsum(1)
    num_chosen = count[:, -1:]
    place = torch.where(chosen, count - 1, num_chosen + entry - count)
    return torch.empty_like(slots).scatter_(1, place, slots), num_chosen[:, 0].to(torch.int32)
