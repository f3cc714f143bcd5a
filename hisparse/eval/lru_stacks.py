"""LRU stack distances: the hit ratio of every buffer size from one pass.

A stack holds pages in the order of last use. A buffer of C pages holds the first C of the stack, so
a page at depth d hits in every buffer with C > d (Mattson et al., 1970).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class _Rows(NamedTuple):
    """One layer's state by request slot, all int64.

    Attributes:
        stacks: ``[B, H, D]``, pages, last used first, -1 padded.
        widths: ``[B, H]``, pages of the last selection.
        lengths: ``[B]``, tokens at the last selection, -1 before the first.
    """

    stacks: Tensor
    widths: Tensor
    lengths: Tensor

    @classmethod
    def new(cls, slots: int, heads: int, depth: int) -> _Rows:
        stacks, lengths = torch.full((slots, heads, depth), -1), torch.full((slots,), -1)
        return cls(stacks, torch.zeros(slots, heads, dtype=torch.long), lengths)


class LruStacks:
    """The stack of each layer and row, cut at a depth.

    Args:
        depth: pages that a stack holds, at least.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._layers: dict[int, _Rows] = {}

    def visit(
        self, layer_id: int, slots: Tensor, seq_lens: Tensor, pages: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Record one selection of a layer.

        Args:
            layer_id: the layer.
            slots: ``[B] int64``, request slots.
            seq_lens: ``[B] int64``, tokens. A slot whose length is not one more than at its last
                selection belongs to another request, and its stack starts empty.
            pages: ``[B, H, K]``, selected pages, -1 padded at the end.

        Returns:
            ``[B, H, K]``, the depth of each page, ``depth`` or more if it is not in the stack;
            ``[B, H]``, pages of the selection before; ``[B]``, whether there was one.
        """
        stacks, widths, lengths = self._rows(layer_id, int(slots.max()) + 1, pages)
        known = lengths[slots] == seq_lens - 1
        stacks[slots[~known]] = -1
        before = widths[slots] * known[:, None]
        depths, stacks[slots] = push(stacks[slots], pages.long())
        widths[slots], lengths[slots] = (pages >= 0).sum(-1), seq_lens
        return depths, before, known

    def _rows(self, layer_id: int, count: int, pages: Tensor) -> _Rows:
        """The layer's state, for at least ``count`` slots."""
        heads, depth = pages.shape[1], max(self._depth, pages.shape[2])
        rows = self._layers.get(layer_id) or _Rows.new(0, heads, depth)
        if len(rows.lengths) < count:
            more = _Rows.new(count - len(rows.lengths), heads, depth)
            rows = _Rows(*(torch.cat(pair) for pair in zip(rows, more, strict=True)))
            self._layers[layer_id] = rows
        return rows


def push(stack: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Move pages to the top of the stack; return their old depths and the new stack.

    Args:
        stack: ``[..., D] int64``, pages, last used first, -1 padded.
        pages: ``[..., K] int64``, used at once, ascending, -1 padded; K is at most D.

    Returns:
        ``[..., K]``, depths in ``0..D``, D for padding and for a page that was not in the stack;
        ``[..., D]``, the new stack.
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
    is_page = both >= 0
    target = is_page.cumsum(-1) - 1
    target.masked_fill_(~is_page | (target >= depth), depth)
    new = torch.full((*stack.shape[:-1], depth + 1), -1).scatter_(-1, target, both)
    return depths, new[..., :-1]
