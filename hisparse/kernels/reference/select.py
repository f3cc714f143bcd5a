"""Scoring and choosing pages in plain PyTorch: the oracle of the other implementations."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.select_rule import SelectRule

__all__ = ["best_pages", "page_score", "select"]


def page_score(
    query: Tensor, summaries: Tensor, host_page_table: Tensor, num_pages: Tensor
) -> Tensor:
    """See :func:`hisparse.kernels.page_score`."""
    own = summaries[host_page_table.long()]
    signed = torch.cat([query.clamp(min=0), query.clamp(max=0)], dim=-1)
    signed = signed.unflatten(1, (summaries.shape[1], -1))
    scores = (signed @ own.permute(0, 2, 3, 1).to(signed.dtype)).flatten(1, 2)
    masked: Tensor = scores.masked_fill_(_absent(scores, num_pages), -torch.inf)
    return masked


def select(
    scores: Tensor, num_pages: Tensor, rest: Tensor | None, rule: SelectRule
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.select`."""
    scores = scores.masked_fill(_absent(scores, num_pages), -torch.inf)
    return best_pages(_combine_heads(scores, rest, rule), num_pages, rule, scores.shape[1])


def best_pages(
    combined: Tensor, num_pages: Tensor, rule: SelectRule, given_heads: int
) -> tuple[Tensor, Tensor]:
    """Choose pages by one score per page.

    Args:
        combined: ``[B, H, P]``; with ``rule.mass``, shares whose sum is the number of heads in a
            group; with ``rule.within``, score minus the best score.
        num_pages: ``[B] int32``.
        rule: how many pages are kept.
        given_heads: heads' of the scores.
    """
    absent, heads = _absent(combined, num_pages), combined.shape[1]
    count, total = num_pages[:, None], combined.shape[-1]
    width = min(rule.max_pages, total)
    page = torch.arange(total, device=combined.device)
    forced = (page < rule.num_sinks) | (page >= count - rule.num_recents)
    # NaN counts as the worst score, so that the selection has as many pages as the rule says.
    worst = torch.finfo(combined.dtype).min if rule.mass is None else 0.0
    combined = combined.nan_to_num(worst, posinf=torch.inf, neginf=-torch.inf)
    ranked = combined.masked_fill(forced[:, None], torch.inf).masked_fill(absent, -torch.inf)
    varies = rule.mass is not None or rule.within is not None
    best = ranked.topk(width, dim=-1, sorted=varies)
    kept = best.values != -torch.inf
    if rule.within is not None:
        kept &= best.values >= -rule.within
    if rule.mass is not None:
        shares = combined.masked_fill(absent, 0).gather(-1, best.indices)
        left_out = combined.masked_fill(absent, 0).sum(-1, keepdim=True) - shares.cumsum(-1)
        # A page is needed while too much is left out without it.
        spare = (1 - rule.mass) * max(1, given_heads // heads)
        kept &= (left_out + shares > spare) | (best.values == torch.inf)
    chosen = torch.where(kept, best.indices, total).sort(dim=-1).values
    chosen = torch.nn.functional.pad(chosen, (0, rule.max_pages - width), value=total)
    pages = chosen.masked_fill(chosen == total, -1).to(torch.int32)
    return pages, kept.sum(-1, dtype=torch.int32)


def _absent(scores: Tensor, num_pages: Tensor) -> Tensor:
    page = torch.arange(scores.shape[-1], device=scores.device)
    absent: Tensor = (page >= num_pages[:, None])[:, None]
    return absent


def _combine_heads(scores: Tensor, rest: Tensor | None, rule: SelectRule) -> Tensor:
    if rule.mass is None and rule.within is None and scores.shape[1] <= rule.heads:
        return scores.repeat_interleave(rule.heads // scores.shape[1], dim=1)
    if rest is None:
        rest = scores.new_full(scores.shape[:2], -torch.inf)
    if rule.within is None:
        # A request without a full page is all -inf. Its softmax is NaN, which the caller masks.
        found = torch.cat([scores, rest[..., None]], -1).softmax(-1)[..., :-1]
    else:
        found = scores - torch.maximum(scores.amax(-1), rest)[..., None]
    if scores.shape[1] <= rule.heads:
        return found.repeat_interleave(rule.heads // scores.shape[1], dim=1)
    groups = found.unflatten(1, (rule.heads, -1))
    combined: Tensor = groups.sum(2) if rule.within is None else groups.amax(2)
    return combined
