"""Scoring and choosing pages in plain PyTorch: the oracle of the other implementations."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["best_pages", "page_score", "select"]


def page_score(
    query: Tensor, summaries: Tensor, host_page_table: Tensor, num_pages: Tensor
) -> Tensor:
    """See :func:`hisparse.kernels.page_score`."""
    own = summaries.index_select(0, host_page_table.flatten()).unflatten(0, host_page_table.shape)
    signed = torch.cat([query.clamp(min=0), query.clamp(max=0)], dim=-1)
    signed = signed.unflatten(1, (summaries.shape[1], -1))
    scores = (signed @ own.permute(0, 2, 3, 1).to(signed.dtype)).flatten(1, 2)
    masked: Tensor = scores.masked_fill_(_absent(scores, num_pages), -torch.inf)
    return masked


def select(
    scores: Tensor,
    num_pages: Tensor,
    heads: int,
    max_pages: int,
    num_sinks: int,
    num_recents: int,
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.select`."""
    absent = _absent(scores, num_pages)
    combined = _combine_heads(scores.masked_fill(absent, -torch.inf), heads)
    return best_pages(combined, num_pages, max_pages, num_sinks, num_recents)


def best_pages(
    combined: Tensor, num_pages: Tensor, max_pages: int, num_sinks: int, num_recents: int
) -> tuple[Tensor, Tensor]:
    """The choice of :func:`select` by one score per page, ``combined [B, H, P]``."""
    absent, heads = _absent(combined, num_pages), combined.shape[1]
    count, total = num_pages[:, None], combined.shape[-1]
    page = torch.arange(max(total, max_pages), device=combined.device)
    forced = (page[:total] < num_sinks) | (page[:total] >= count - num_recents)
    combined = combined.masked_fill(forced[:, None], torch.inf).masked_fill(absent, -torch.inf)
    best = combined.topk(min(max_pages, total), dim=-1, sorted=False)
    chosen = torch.where(best.values == -torch.inf, total, best.indices).sort(dim=-1).values
    chosen = torch.nn.functional.pad(chosen, (0, max_pages - chosen.shape[-1]), value=total)
    lengths = count.clamp(max=max_pages).expand(-1, heads)
    return chosen.masked_fill(chosen == total, -1).to(torch.int32), lengths.contiguous()


def _absent(scores: Tensor, num_pages: Tensor) -> Tensor:
    page = torch.arange(scores.shape[-1], device=scores.device)
    absent: Tensor = (page >= num_pages[:, None])[:, None]
    return absent


def _combine_heads(scores: Tensor, heads: int) -> Tensor:
    if scores.shape[1] <= heads:
        return scores.repeat_interleave(heads // scores.shape[1], dim=1)
    # A request without a full page is all -inf: its softmax is NaN, and is masked by the caller.
    shares: Tensor = scores.softmax(-1).unflatten(1, (heads, -1)).sum(2)
    return shares
