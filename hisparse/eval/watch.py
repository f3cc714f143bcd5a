"""What a method keeps: measured at its selections, against exact attention."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

from hisparse.algorithms import tail_logits
from hisparse.batch import DecodeStep
from hisparse.kernels import key_score
from hisparse.types import Selection

__all__ = ["Watch"]

#: Steps between two that are compared with exact attention, which is dear.
_STRIDE = 4


class Watch:
    """Observes the selections of a cache, see ``HiSparseCache.observe``.

    Args:
        buffers: sizes of an LRU buffer, in pages, whose hit ratio is to be known.
    """

    def __init__(self, buffers: dict[str, int]) -> None:
        self._buffers = buffers
        self._mass: list[Tensor] = []
        self._recall: list[Tensor] = []
        self._tokens: list[Tensor] = []
        self._capped: list[Tensor] = []
        self._overlap: list[float] = []
        self._hits = dict.fromkeys(buffers, 0)
        self._selected = 0
        self._before: dict[tuple[int, int], list[set[int]]] = {}
        self._lru: dict[tuple[str, int, int, int], OrderedDict[int, None]] = {}
        self._lengths: dict[tuple[int, int], int] = {}
        self._calls: dict[int, int] = {}

    def __call__(self, layer_id: int, queries: Tensor, step: DecodeStep, chosen: Selection) -> None:
        """One selection of a layer."""
        size, chosen = step.policy.kv.page_size, Selection(*(x.cpu() for x in chosen))
        tail_lens = step.tail_lens[:, None].cpu()
        self._tokens.append((chosen.lengths * size + tail_lens).flatten().float())
        self._capped.append((chosen.lengths == step.policy.max_pages).flatten().float())
        calls = self._calls[layer_id] = self._calls.get(layer_id, -1) + 1
        if calls % _STRIDE == 0:
            self._compare(layer_id, queries, step, chosen)
        self._follow(layer_id, step, chosen)

    def _compare(self, layer_id: int, queries: Tensor, step: DecodeStep, chosen: Selection) -> None:
        """Mass kept, and how many of the best pages, as many as were chosen, are among them."""
        shares, tail = _shares(layer_id, queries, step)
        heads, pages = step.policy.heads, chosen.pages.long()
        kept = torch.zeros(*pages.shape[:2], shares.shape[-1] + 1)
        kept.scatter_(-1, pages.masked_fill(pages < 0, shares.shape[-1]), 1.0)
        kept = kept[..., :-1]
        grouped = shares.unflatten(1, (heads, -1))
        mass = (grouped * kept[:, :, None]).sum(-1) + tail.unflatten(1, (heads, -1))
        self._mass.append(mass.flatten())
        combined = grouped.sum(2)
        rank = combined.argsort(-1, descending=True).argsort(-1)
        best = rank < chosen.lengths[..., None]
        self._recall.append(((best * kept).sum(-1) / chosen.lengths.clamp(min=1)).flatten())

    def _follow(self, layer_id: int, step: DecodeStep, chosen: Selection) -> None:
        """Overlap of adjacent steps, and LRU buffers."""
        lens = step.seq_lens_cpu.tolist()
        for slot, length, heads in zip(
            step.slots.tolist(), lens, chosen.pages.tolist(), strict=True
        ):
            now = [{page for page in head if page >= 0} for head in heads]
            before = self._before.get((layer_id, slot), [])
            if self._lengths.get((layer_id, slot)) != length - 1:
                # Another request has the slot.
                before = []
                for key in [k for k in self._lru if k[1:3] == (layer_id, slot)]:
                    del self._lru[key]
            self._lengths[layer_id, slot] = length
            for head, (a, b) in enumerate(zip(before, now, strict=False)):
                if b:
                    self._overlap.append(len(a & b) / len(b))
                    self._visit((layer_id, slot, head), b)
            self._before[layer_id, slot] = now

    def _visit(self, row: tuple[int, int, int], pages: set[int]) -> None:
        self._selected += len(pages)
        for name, capacity in self._buffers.items():
            buffer = self._lru.setdefault((name, *row), OrderedDict())
            self._hits[name] += sum(page in buffer for page in pages)
            for page in sorted(pages):
                buffer[page] = None
                buffer.move_to_end(page)
            while len(buffer) > max(capacity, len(pages)):
                buffer.popitem(last=False)

    def summary(self) -> dict[str, float | dict[str, float]]:
        """Means over all selections; empty if nothing was selected."""
        if not self._tokens:
            return {}
        tokens = torch.cat(self._tokens)
        return {
            "mass": float(torch.cat(self._mass).mean()),
            "oracle_recall": float(torch.cat(self._recall).mean()),
            "adjacent_overlap": float(np.mean(self._overlap)) if self._overlap else 1.0,
            "kept_mean": float(tokens.mean()),
            "kept_p95": float(tokens.quantile(0.95)) if tokens.numel() < 10**7 else _p95(tokens),
            "capped": float(torch.cat(self._capped).mean()),
            "hit_ratio": {n: h / max(1, self._selected) for n, h in self._hits.items()},
        }


def _p95(tokens: Tensor) -> float:
    """Of more values than ``quantile`` takes."""
    return float(tokens.kthvalue(int(0.95 * tokens.numel())).values)


def _shares(layer_id: int, queries: Tensor, step: DecodeStep) -> tuple[Tensor, Tensor]:
    """Exact attention: each full page's part, and the tail's.

    Returns:
        ``[B, Hq, max_pages]`` and ``[B, Hq]``, together 1.
    """
    query = queries.float() * step.policy.scale
    # Where the keys lie, whatever device the model runs on.
    pages = key_score(
        query.cpu(),
        step.host_keys(layer_id),
        step.host_page_table[:, : step.max_pages].cpu(),
        step.num_pages.cpu(),
        reduce="lse",
    )
    tail = tail_logits(query, layer_id, step).logsumexp(-1).cpu()
    both = torch.cat([pages, tail[..., None]], -1).softmax(-1)
    return both[..., :-1], both[..., -1]
