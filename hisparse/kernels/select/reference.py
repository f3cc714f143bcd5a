"""Choosing pages in plain PyTorch: the oracle of the other implementations."""

import torch
from torch import Tensor

from hisparse.kernels.select.op import SelectRule


def select(
    scores: Tensor,
    num_pages: Tensor,
    forced: Tensor | None,
    rest: Tensor | None,
    invalid_scores: Tensor | None,
    rule: SelectRule,
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.select`."""
    scores, num_pages = scores.float(), num_pages.clamp(0, scores.shape[-1])
    if invalid_scores is not None:
        invalid_scores.add_(_has_invalid_score(scores, num_pages, rest, rule).sum())
    scores = _finite(scores).masked_fill(_absent(scores, num_pages), -torch.inf)
    combined = _combine_heads(scores, None if rest is None else _finite(rest), rule)
    absent, total = _absent(combined, num_pages), combined.shape[-1]
    width = min(rule.max_pages, total)
    # Infinities stand for forced and for absent pages.
    limit = torch.finfo(combined.dtype).max
    scores = combined.nan_to_num(-limit).clamp(-limit, limit)
    if forced is not None:
        scores = scores.masked_fill(forced[:, None], torch.inf)
    scores = scores.masked_fill(absent, -torch.inf)
    best = scores.topk(width, dim=-1)
    kept = best.values != -torch.inf
    if rule.within is not None:
        kept &= best.values >= -rule.within
    lengths = kept.sum(-1, keepdim=True)
    pages = _ascending(scores, best.values, lengths, rule.max_pages)
    if rule.drop_last:
        is_last = pages == (num_pages - 1).clamp(0, max(total - 1, 0))[:, None, None]
        pages, lengths = pages.masked_fill(is_last, -1), lengths - is_last.sum(-1, keepdim=True)
    return pages, lengths[..., 0].int()


def _ascending(scores: Tensor, best: Tensor, lengths: Tensor, max_pages: int) -> Tensor:
    """The ``lengths [B, H, 1]`` best pages in ascending order; of equal scores the first.

    Args:
        scores: ``[B, H, P]``.
        best: ``[B, H, min(K, P)]``, the largest scores, in descending order.
        lengths: ``[B, H, 1] int64``.
        max_pages: K.
    """
    pages = lengths.new_full((*lengths.shape[:2], max_pages + 1), -1, dtype=torch.int32)
    if best.shape[-1] == 0:
        return pages[..., :-1]
    least = best.gather(-1, (lengths - 1).clamp(min=0))
    chosen = (scores > least) & (lengths > 0)
    ties = (scores == least) & (lengths > 0)
    chosen |= ties & (ties.cumsum(-1) <= lengths - chosen.sum(-1, keepdim=True))
    # The last entry collects the pages that are not chosen.
    entry = torch.where(chosen, chosen.cumsum(-1) - 1, max_pages)
    page = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
    return pages.scatter_(-1, entry, page.expand_as(entry))[..., :-1]


def _has_invalid_score(
    scores: Tensor, num_pages: Tensor, rest: Tensor | None, rule: SelectRule
) -> Tensor:
    """``[B, H] bool``, selections that a NaN or +inf among the scores may have changed."""
    heads, varies = scores.shape[1], rule.within is not None
    largest = torch.finfo(scores.dtype).max
    invalid = (~(scores <= largest)).masked_fill(_absent(scores, num_pages), False).any(-1)
    if rest is not None and (varies or heads > rule.heads):
        invalid |= ~(rest <= largest) & (num_pages > 0)[:, None]
    if heads > rule.heads:
        invalid = invalid.unflatten(1, (rule.heads, -1)).any(-1)
    invalid = invalid.repeat_interleave(rule.heads // invalid.shape[1], dim=1)
    # Otherwise all pages are selected, whatever their scores.
    return invalid if varies else invalid & (num_pages > rule.max_pages)[:, None]


def _finite(scores: Tensor) -> Tensor:
    """NaN as -inf, and inf as the largest number, so that a difference of scores is no NaN."""
    return scores.nan_to_num(-torch.inf, neginf=-torch.inf)


def _absent(scores: Tensor, num_pages: Tensor) -> Tensor:
    page = torch.arange(scores.shape[-1], device=scores.device)
    absent: Tensor = (page >= num_pages[:, None])[:, None]
    return absent


def _combine_heads(scores: Tensor, rest: Tensor | None, rule: SelectRule) -> Tensor:
    if rule.within is None and scores.shape[1] <= rule.heads:
        return scores.repeat_interleave(rule.heads // scores.shape[1], dim=1)
    if rest is None:
        rest = scores.new_full(scores.shape[:2], -torch.inf)
    # Where all scores of a head are -inf, it has no share and no page near its best score.
    if rule.within is None:
        found = torch.cat([scores, rest[..., None]], -1).softmax(-1)[..., :-1].nan_to_num(0)
    else:
        found = scores - torch.maximum(scores.amax(-1), rest)[..., None]
        found = found.nan_to_num(-torch.inf, neginf=-torch.inf)
    if scores.shape[1] <= rule.heads:
        return found.repeat_interleave(rule.heads // scores.shape[1], dim=1)
    groups = found.unflatten(1, (rule.heads, -1))
    combined: Tensor = groups.sum(2) if rule.within is None else groups.amax(2)
    return combined
