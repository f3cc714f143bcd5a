"""LRU buffers of all sizes at once: how deep in the order of last use a page lies.

A buffer of C pages holds the first C of that order (Mattson et al., 1970), so one pass tells the
hits of every C.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["LruStacks", "push"]


class _Rows(NamedTuple):
    """One layer's state by slot: ``[B, H, D]``, ``[B, H]`` and ``[B]``, all int64."""

    stacks: Tensor
    widths: Tensor
    lengths: Tensor

    @classmethod
    def new(cls, slots: int, heads: int, depth: int) -> _Rows:
        stacks, lengths = torch.full((slots, heads, depth), -1), torch.full((slots,), -1)
        return cls(stacks, torch.zeros(slots, heads, dtype=torch.long), lengths)


class LruStacks:
    """The order of last use of each layer's rows, deepest ones forgotten.

    Args:
        depth: pages that are followed, at least.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._layers: dict[int, _Rows] = {}

    def visit(
        self, layer_id: int, slots: Tensor, seq_lens: Tensor, pages: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One selection of a layer.

        Args:
            layer_id: whose selection it is.
            slots: ``[B] int64``, request slots.
            seq_lens: ``[B] int64``, tokens; a slot whose length is not one more than at its last
                visit is another request's and begins anew.
            pages: ``[B, H, K]``, -1 padded at the end.

        Returns:
            ``[B, H, K]`` how many pages were used after each page's last use, at least ``depth`` if
            it was not used; ``[B, H]`` how many pages the visit before had; ``[B]`` whether there
            was one.
        """
        stacks, widths, lengths = self._rows(layer_id, int(slots.max()) + 1, pages)
        known = lengths[slots] == seq_lens - 1
        stacks[slots[~known]] = -1
        before = widths[slots] * known[:, None]
        depths, stacks[slots] = push(stacks[slots], pages.long())
        widths[slots], lengths[slots] = (pages >= 0).sum(-1), seq_lens
        return depths, before, known

    def _rows(self, layer_id: int, count: int, pages: Tensor) -> _Rows:
        """Of at least ``count`` slots."""
        heads, depth = pages.shape[1], max(self._depth, pages.shape[2])
        rows = self._layers.get(layer_id) or _Rows.new(0, heads, depth)
        if len(rows.lengths) < count:
            more = _Rows.new(count - len(rows.lengths), heads, depth)
            rows = _Rows(*(torch.cat(pair) for pair in zip(rows, more, strict=True)))
            self._layers[layer_id] = rows
        return rows


def push(stack: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Use pages: the depths that they had, and the new order.

    Args:
        stack: ``[..., D] int64``, pages, last used first, -1 padded.
        pages: ``[..., K] int64``, used at once, ascending, -1 padded; K is at most D.

    Returns:
        ``[..., K]`` in ``0..D``, D for a page that was not there and for padding; ``[..., D]``.
    """
    depth = stack.shape[-1]
    absent = int(max(stack.max(), pages.max())) + 1
    depth_of = torch.full((*stack.shape[:-1], absent + 1), depth)
    depth_of.scatter_(
        -1, stack.masked_fill(stack < 0, absent), torch.arange(depth).expand_as(stack)
    )
    depth_of[..., absent] = depth
    depths = depth_of.gather(-1, pages.masked_fill(pages < 0, absent))
    used = torch.zeros((*stack.shape[:-1], depth + 1), dtype=torch.bool).scatter_(-1, depths, True)
    both = torch.cat([pages.flip(-1), stack.masked_fill(used[..., :-1], -1)], -1)
    there = both >= 0
    target = there.cumsum(-1) - 1
    target.masked_fill_(~there | (target >= depth), depth)
    new = torch.full((*stack.shape[:-1], depth + 1), -1).scatter_(-1, target, both)
    return depths, new[..., :-1]
