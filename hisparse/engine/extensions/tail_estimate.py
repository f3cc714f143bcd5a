"""Tail estimate: approximate each unselected page by its mean key and value.

One token with the page's mean key and mean value represents the page, weighted by the number of
tokens. The estimate is exact if all keys of a page are equal; otherwise it is below the page's
share of attention (Jensen). Measured on small models, it more than halves the divergence from dense
attention if the peaks are selected, and hurts if the selector misses them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hisparse.adapters import Attended, TableLimits, merge_attended
from hisparse.algorithms import DecodeStep, Representation, SelectionPolicy
from hisparse.cache.formats import format_of
from hisparse.config import HiSparseConfig
from hisparse.engine.extensions.base import Extension, register_extension
from hisparse.errors import ConfigError
from hisparse.types import PagedKV, Selection

_MEAN_K, _MEAN_V = "tail_estimate.mean_k", "tail_estimate.mean_v"


@dataclass(frozen=True, kw_only=True)
class TailEstimateOptions:
    """The extension has no options."""


@register_extension("tail_estimate")
class TailEstimate(Extension):
    """Keeps the mean key and value of each page, and attends over those of unselected pages."""

    options_type: ClassVar[type[Any]] = TailEstimateOptions
    store_version: ClassVar[int | None] = 1

    @classmethod
    def check(cls, options: TailEstimateOptions, config: HiSparseConfig) -> None:
        if config.page_size == 1:
            raise ConfigError(
                "tail_estimate: got true with page_size 1, where the mean of a page is its token; "
                "expected page_size above 1, or tail_estimate false"
            )

    @classmethod
    def state(
        cls, options: TailEstimateOptions, policy: SelectionPolicy
    ) -> dict[str, Representation]:
        """Mean key and mean value of each page; values that are a part of the keys are not kept."""
        kv = policy.kv
        means = zip((_MEAN_K, _MEAN_V), format_of(kv).plain.parts, strict=False)
        return {name: Representation((kv.num_kv_heads, x.width), x.dtype) for name, x in means}

    @classmethod
    def attended_tables(
        cls, policy: SelectionPolicy, *, max_requests: int, context_pages: int
    ) -> Sequence[TableLimits]:
        kv, heads = policy.kv, policy.heads
        stored_heads, queries = kv.num_kv_heads if heads == 1 else 1, kv.num_q_heads // heads
        rows = max_requests * heads
        return [TableLimits(heads, rows, context_pages, queries, stored_heads, 1)]

    def store_pages(self, layer_id: int, keys: Tensor, values: Tensor, host_pages: Tensor) -> None:
        """Store means of complete pages.

        ``keys, values [P, S, Hkv, D]``, any float dtype; ``host_pages [P]``, int32 or int64.
        """
        for name, tokens in ((_MEAN_K, keys), (_MEAN_V, values)):
            if name in self.context.state:
                means = self.context.state[name][layer_id]
                means[host_pages.long()] = tokens.float().mean(1).to(means.dtype)

    def after_attention(
        self,
        layer_id: int,
        queries: Tensor,
        selection: Selection,
        step: DecodeStep,
        attended: Attended,
    ) -> Attended:
        """Merge attention over the means of the unselected full pages.

        ``queries [R, Q, D]``, model's dtype; the merged output is float32.
        """
        return merge_attended(attended, self._estimate(layer_id, queries, selection, step))

    def _estimate(
        self, layer_id: int, queries: Tensor, selection: Selection, step: DecodeStep
    ) -> Attended:
        """Attention over the means: out ``[R, Q, Dv]``; lse ``[R, Q]``, -inf without any page."""
        policy = self.context.policy
        heads, kv_heads = policy.heads, policy.kv.num_kv_heads
        others, counts = _complement(selection, step.num_pages, step.max_pages)
        table = step.host_page_table[:, None, : step.max_pages].expand_as(others)
        table = table.gather(-1, others)
        # Each mean is a page of one token; a row per head sees only the means of its KV head.
        means = self._means(layer_id, one_head=heads > 1)
        if heads > 1:
            kv_head = torch.arange(heads, dtype=torch.int32, device=table.device)
            table = table * kv_heads + (kv_head * kv_heads // heads)[:, None]
        out, lse = self.context.adapter.attend(
            queries, means, table.flatten(0, 1), counts.flatten(), policy.attention_rule
        )
        return Attended(out, lse + math.log(policy.kv.page_size))

    def _means(self, layer_id: int, *, one_head: bool) -> PagedKV:
        """The means as pages of one token: with all KV heads, or with one KV head each."""
        state, kv = self.context.state, self.context.policy.kv
        k = state[_MEAN_K][layer_id]
        k = k.view(-1, 1, 1, k.shape[-1]) if one_head else k[:, :, None]
        if _MEAN_V not in state:
            return PagedKV(k, k[..., : kv.v_head_dim])
        v = state[_MEAN_V][layer_id]
        return PagedKV(k, v.view(-1, 1, 1, v.shape[-1]) if one_head else v[:, :, None])


def _complement(selection: Selection, num_pages: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The full pages outside a selection.

    Returns:
        pages ``[B, H, width] int64``, ascending, padded with 0; counts ``[B, H] int32``.
    """
    pages = selection.pages.long()
    page = torch.arange(width, device=pages.device)
    left = (page < num_pages[:, None])[:, None].repeat(1, pages.shape[1], 1)
    # Padding is written to an additional column.
    left = torch.nn.functional.pad(left, (0, 1))
    left.scatter_(-1, torch.where(pages < 0, width, pages), False)
    left = left[..., :width]
    rank = torch.where(left, left.cumsum(-1) - 1, width)
    others = torch.zeros((*left.shape[:2], width + 1), dtype=torch.int64, device=pages.device)
    others.scatter_(-1, rank, page.expand_as(rank))
    return others[..., :width], (num_pages[:, None] - selection.lengths).to(torch.int32)
