"""Statistics of a method's selections, compared with exact attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hisparse.algorithms import DecodeStep
from hisparse.kernels import key_score
from hisparse.types import Selection


class LruStacks:
    """The stack of each layer and row, cut at a depth: hit ratios of every buffer in one pass.

    A stack holds pages in the order of last use. A buffer of C pages holds the first C of the
    stack, so a page at depth d hits in every buffer with C > d (Mattson et al., 1970).

    Args:
        depth: pages that a stack holds, at least.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        #: By request slot, int64: stacks ``[B, H, D]``, pages of the last selection ``[B, H]`` and
        #: tokens at it ``[B]``, -1 before the first.
        self._layers: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

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
        stacks, widths, lengths = self._state(layer_id, int(slots.max()) + 1, pages)
        known = lengths[slots] == seq_lens - 1
        stacks[slots[~known]] = -1
        before = widths[slots] * known[:, None]
        depths, stacks[slots] = push(stacks[slots], pages.long())
        widths[slots], lengths[slots] = (pages >= 0).sum(-1), seq_lens
        return depths, before, known

    def _state(self, layer_id: int, count: int, pages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A layer's state, for at least ``count`` slots."""
        old = self._layers.get(layer_id)
        more = count if old is None else count - len(old[2])
        if more > 0:
            heads, depth = pages.shape[1], max(self._depth, pages.shape[2])
            stacks, widths = torch.full((more, heads, depth), -1), torch.zeros(more, heads).long()
            new = (stacks, widths, torch.full((more,), -1))
            if old is not None:
                first, second, third = map(torch.cat, zip(old, new, strict=True))
                new = (first, second, third)
            self._layers[layer_id] = new
        return self._layers[layer_id]


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


#: Sizes of the simulated LRU buffers, in budgets.
BUFFERS = (1, 1.5, 2, 3, 4, 6, 8)
#: One step in so many is compared with exact attention, which is slow.
_EXACT_STRIDE = 8
#: One selecting layer in so many has its LRU buffers simulated: with pages of one token that takes
#: longer than the model itself.
_LRU_LAYER_STRIDE = 3


class SelectionStats:
    """A selection callback that accumulates statistics; pass it to ``SparseCoordinator.observe``.

    Args:
        budget_pages: pages of the budget; ``BUFFERS`` are multiples of it.
    """

    def __init__(self, budget_pages: int) -> None:
        self._buffers = {f"{size:g}x": int(size * budget_pages) for size in BUFFERS}
        self._mass: list[Tensor] = []
        self._recall: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self._capped: list[Tensor] = []
        self._overlap: list[Tensor] = []
        self._hits = dict.fromkeys(self._buffers, 0)
        self._selected = 0
        self._kept: dict[int, Tensor] = {}
        self._rows: dict[int, int] = {}
        self._calls: dict[int, int] = {}
        self._scope, self._num_layers = "", 0
        self.start_batch()

    def start_batch(self) -> None:
        """Forget the LRU state before a batch of other rows."""
        self._stacks = LruStacks(max(self._buffers.values()))
        self._calls.clear()

    def __call__(self, layer_id: int, queries: Tensor, step: DecodeStep, chosen: Selection) -> None:
        """Record one selection of a layer."""
        size, chosen = step.policy.kv.page_size, Selection(*(x.cpu() for x in chosen))
        tail_lens = step.tail_lens[:, None].cpu()
        tokens = (chosen.lengths * size + tail_lens).float()
        self._scope, self._num_layers = step.policy.scope, step.policy.kv.num_layers
        self._kept[layer_id] = self._kept.get(layer_id, 0) + tokens.sum(0, dtype=torch.float64)
        self._rows[layer_id] = self._rows.get(layer_id, 0) + len(tokens)
        self._tokens.append(tokens.flatten())
        self._capped.append((chosen.lengths == step.policy.max_pages).flatten().float())
        calls = self._calls[layer_id] = self._calls.get(layer_id, -1) + 1
        if calls % _EXACT_STRIDE == 0:
            self._compare_with_exact(layer_id, queries, step, chosen)
        if list(self._calls).index(layer_id) % _LRU_LAYER_STRIDE == 0:
            self._simulate_lru(layer_id, step, chosen)

    def _compare_with_exact(
        self, layer_id: int, queries: Tensor, step: DecodeStep, chosen: Selection
    ) -> None:
        """Record the attention mass kept, and how many of the n best pages the n selected hold."""
        weights, tail = _exact_attention(layer_id, queries, step)
        heads, pages = step.policy.heads, chosen.pages.long()
        kept = torch.zeros(*pages.shape[:2], weights.shape[-1] + 1)
        kept.scatter_(-1, pages.masked_fill(pages < 0, weights.shape[-1]), 1.0)
        kept = kept[..., :-1]
        grouped = weights.unflatten(1, (heads, -1))
        mass = (grouped * kept[:, :, None]).sum(-1) + tail.unflatten(1, (heads, -1))
        self._mass.append(mass.flatten())
        combined = grouped.sum(2)
        # Sorted, best first; only the first n count, n being the pages selected.
        best = combined.topk(min(pages.shape[-1], combined.shape[-1]), dim=-1).indices
        counted = torch.arange(best.shape[-1]) < chosen.lengths[..., None]
        found = (kept.gather(-1, best) * counted).sum(-1)
        self._recall.append((found / chosen.lengths.clamp(min=1)).flatten())

    def _simulate_lru(self, layer_id: int, step: DecodeStep, chosen: Selection) -> None:
        """Record LRU hits and the overlap of adjacent steps, from a request's second step on."""
        slots, seq_lens = step.slots.cpu(), step.seq_lens.cpu().long()
        depths, before, known = self._stacks.visit(layer_id, slots, seq_lens, chosen.pages)
        counted = (chosen.pages >= 0) & known[:, None, None]
        self._selected += int(counted.sum())
        for name, size in self._buffers.items():
            # A selection larger than the buffer enlarges it.
            held = before.clamp(min=size)[..., None]
            self._hits[name] += int(((depths < held) & counted).sum())
        again = ((depths < before[..., None]) & counted).sum(-1)
        some = known[:, None] & (chosen.lengths > 0)
        self._overlap.append((again / chosen.lengths.clamp(min=1))[some])

    def summary(self) -> dict[str, Any]:
        """The fields of :func:`~hisparse.eval.results.make_summary` that describe selections.

        Values are means over all selections, or over a sample where measuring is slow.
        ``kept_by_head`` has, for each layer, tokens attended by head of the selection, or None for
        a layer without a selection of its own: a dense layer, or one that reuses the selection of
        an earlier layer.

        Returns:
            The fields; empty if nothing was selected.
        """
        if not self._tokens:
            return {}
        tokens, overlap = torch.cat(self._tokens), torch.cat(self._overlap)
        return {
            "selection_scope": self._scope,
            "mass": float(torch.cat(self._mass).mean()),
            "oracle_recall": float(torch.cat(self._recall).mean()),
            "adjacent_overlap": float(overlap.mean()) if len(overlap) else 1.0,
            "kept_mean": float(tokens.mean()),
            "kept_p95": float(np.quantile(tokens.numpy(), 0.95)),
            "kept_by_head": [self._mean_kept(layer) for layer in range(self._num_layers)],
            "capped": float(torch.cat(self._capped).mean()),
            "hit_ratio": {n: h / max(1, self._selected) for n, h in self._hits.items()},
        }

    def _mean_kept(self, layer_id: int) -> list[float] | None:
        if layer_id not in self._kept:
            return None
        means: list[float] = (self._kept[layer_id] / self._rows[layer_id]).tolist()
        return means


def _exact_attention(layer_id: int, queries: Tensor, step: DecodeStep) -> tuple[Tensor, Tensor]:
    """Exact attention weights, summed over the tokens of each page.

    Returns:
        ``[B, Hq, max_pages]`` of the full pages and ``[B, Hq]`` of the tail page; they add up to 1.
    """
    query, size = queries.float() * step.policy.scale, step.policy.kv.page_size
    # Rows share most pages, so each is read once. Keys come in the model's dtype, also from fp8.
    used, table = step.host_page_table[:, : step.max_pages].unique(return_inverse=True)
    host_slots = used.long()[:, None] * size + torch.arange(size, device=used.device)
    keys = step.kv_io.read_tokens(layer_id, host_slots.flatten()).k.unflatten(0, (-1, size))
    pages = key_score(
        query.cpu(),
        keys.transpose(1, 2).cpu(),
        table.int().cpu(),
        step.num_pages.cpu(),
        reduce="lse",
        logit_cap=step.policy.logit_cap,
    )
    tail = step.tail_lse(layer_id, query).cpu()
    both = torch.cat([pages, tail[..., None]], -1).softmax(-1)
    return both[..., :-1], both[..., -1]
