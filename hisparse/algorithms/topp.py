"""Twilight: keep a given fraction of the attention mass. https://arxiv.org/abs/2502.02770"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hisparse.algorithms.base import BaseSparseAlgorithm, Representation, register_algorithm
from hisparse.algorithms.step import DecodeStep, PrefillStep, SelectionPolicy
from hisparse.kernels import cap_logits, select
from hisparse.kernels.operation import new_tensors
from hisparse.types import Selection

_CODES, _RANGES = "codes", "ranges"
#: Bytes of codes that are unpacked at a time: limits the memory for levels.
_BLOCK = 2**20
_LARGEST = torch.finfo(torch.float32).max
#: Quantisation steps between the smallest and the largest value of a key.
_LEVELS = 15


@register_algorithm("topp")
@dataclass(frozen=True, kw_only=True)
class TopP(BaseSparseAlgorithm):
    """Keeps the fewest pages with a total attention of ``mass``; their number varies by query.

    Weights are estimated as in section 4.2 of the paper, from 4-bit keys that are quantised for
    each token and head between their smallest and largest value. The paper's first stage, a cheaper
    selector with a generous budget, is left out: every page is estimated. Heads that share a
    selection keep ``mass`` of their attention on average. ``device_buffer_size`` caps what is kept.

    Attributes:
        mass: in (0, 1); share of the attention weights to keep, p in the paper.
    """

    variable_lengths: ClassVar[bool] = True
    store_version: ClassVar[int | None] = 1
    captured_launches: ClassVar[int] = 250

    mass: float = 0.95

    def __post_init__(self) -> None:
        if not 0 < self.mass < 1:
            raise ValueError(f"mass: got {self.mass}, expected more than 0 and less than 1")

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        kv = policy.kv
        tokens = (kv.page_size, kv.num_kv_heads)
        return {
            # Two channels per byte: one from each half of D.
            _CODES: Representation((*tokens, -(-kv.head_dim // 2)), torch.uint8),
            # The smallest value and the step size.
            _RANGES: Representation((*tokens, 2), torch.bfloat16),
        }

    def store(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: PrefillStep | DecodeStep
    ) -> None:
        """Quantise the keys of complete pages to four bits per channel.

        ``keys [P, S, Hkv, D]``, any float dtype; ``host_pages [P]``, int32 or int64.
        """
        keys = keys.float()
        low = keys.amin(-1, keepdim=True)
        width = (keys.amax(-1, keepdim=True) - low) / _LEVELS
        # Quantise with the rounded range, which later steps decode with.
        ranges = torch.cat([low, width], -1).to(torch.bfloat16)
        low, width = ranges.float().split(1, -1)
        code = (keys - low).div_(width.clamp(min=1e-30)).round_().clamp_(0, _LEVELS).to(torch.uint8)
        if code.shape[-1] % 2:
            code = torch.nn.functional.pad(code, (0, 1))
        first, second = code.chunk(2, -1)
        step.representations[_CODES][layer_id, host_pages.long()] = first | (second << 4)
        step.representations[_RANGES][layer_id, host_pages.long()] = ranges

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        policy = step.policy
        query = step.scaled(queries)
        return select(
            _page_scores(query, layer_id, step),
            step.num_pages,
            policy.select_rule_with(mass=self.mass),
            forced=step.forced_pages,
            rest=step.tail_lse(layer_id, query),
        )


def _page_scores(query: Tensor, layer_id: int, step: DecodeStep) -> Tensor:
    """Estimate the log-sum-exp of the logits of each page's tokens.

    Args:
        query: ``[B, Hq, D] float32``, times the softmax scale.
        layer_id: layer number.
        step: the step.

    Returns:
        ``[B, Hq, max_pages] float32``.
    """
    batch, heads, _ = query.shape
    page_bytes = step.representations[_CODES][layer_id, 0].numel() * batch

    def split() -> list[Tensor]:
        table = step.host_page_table[:, : step.max_pages]
        return [x.flatten() for x in table.split(max(1, _BLOCK // page_bytes), dim=1)]

    shapes = [((batch, heads, x), torch.float32) for x in (step.max_pages, 1)]
    scores, sums = new_tensors("topp scores", shapes, query.device)
    torch.sum(query, -1, keepdim=True, out=sums)
    end = 0
    for pages in step.once("blocks", split):
        first, end = end, end + len(pages) // batch
        scores[..., first:end] = _block_scores(query, sums, pages, layer_id, step)
    return scores


def _block_scores(
    query: Tensor, sums: Tensor, pages: Tensor, layer_id: int, step: DecodeStep
) -> Tensor:
    """``[B, Hq, P]`` for host pages ``[B * P] int32``, with sums ``[B, Hq, 1]`` of the query."""
    kv, batch, stored = step.policy.kv, len(query), step.representations
    grouped, sums = (x.unflatten(1, (kv.num_kv_heads, -1)) for x in (query, sums))
    levels = _levels(stored[_CODES][layer_id], pages, grouped)
    shape = (*grouped.shape[:3], *levels.shape[2:4])
    logits, offset = new_tensors("topp logits", [(shape, torch.float32)] * 2, query.device)
    entries = stored[_RANGES][layer_id]
    shapes = [((len(pages), *entries.shape[1:]), entries.dtype)]
    shapes += [((2, batch, kv.num_kv_heads, *levels.shape[2:4]), torch.float32)]
    found, ranges = new_tensors("topp ranges", shapes, query.device)
    torch.index_select(entries, 0, pages, out=found)
    ranges.copy_(found.unflatten(0, (batch, -1)).permute(4, 0, 3, 1, 2))
    low, width = ranges[:, :, :, None]
    product = logits.flatten(3).flatten(0, 1)
    torch.bmm(grouped.flatten(0, 1), levels.flatten(2, 3).flatten(0, 1).mT, out=product)
    torch.mul(sums[..., None], low, out=offset)
    cap_logits(logits.mul_(width).add_(offset), step.policy.logit_cap)
    return _log_sum_exp(logits).flatten(1, 2)


def _levels(codes: Tensor, pages: Tensor, grouped: Tensor) -> Tensor:
    """Levels of ``codes [host pages, S, Hkv, D / 2]``: ``[B, Hkv, P, S, D] float32``."""
    batch, kv_heads, _, dim = grouped.shape
    size, _, half = codes.shape[1:]
    shape = (len(pages), *codes.shape[1:])
    code, bits = new_tensors("topp codes", [(shape, torch.uint8)] * 2, codes.device)
    shape = (batch, kv_heads, len(pages) // batch, size, dim)
    (levels,) = new_tensors("topp levels", [(shape, torch.float32)], codes.device)
    torch.index_select(codes, 0, pages, out=code)
    channels = bits.unflatten(0, (batch, -1)).permute(0, 3, 1, 2, 4)
    torch.bitwise_and(code, 15, out=bits)
    levels[..., :half] = channels
    torch.bitwise_right_shift(code, 4, out=bits)
    levels[..., half:] = channels[..., : dim - half]
    return levels


def _log_sum_exp(logits: Tensor) -> Tensor:
    """Log-sum-exp of ``logits [..., S] float32``, which are overwritten -> ``[...] float32``."""
    top, sums = new_tensors("log-sum-exp", [(logits.shape[:-1], torch.float32)] * 2, logits.device)
    # A difference of infinities would be NaN.
    torch.amax(logits, -1, out=top).clamp_(-_LARGEST, _LARGEST)
    torch.sum(logits.sub_(top[..., None]).exp_(), -1, out=sums)
    return sums.log_().add_(top)
