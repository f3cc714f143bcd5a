"""Twilight: keep a given fraction of the attention mass. https://arxiv.org/abs/2502.02770"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hisparse.algorithms.base import BaseSparseAlgorithm, Representation, register_algorithm
from hisparse.algorithms.step import DecodeStep, PrefillStep, SelectionPolicy
from hisparse.kernels import cap_logits, select
from hisparse.types import Selection

_CODES, _RANGES = "codes", "ranges"
#: Bytes of codes that are unpacked at a time: limits the memory for levels.
_BLOCK = 2**20
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
    captured_launches: ClassVar[int] = 182

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
        query = queries.float() * policy.scale
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
    table = step.host_page_table[:, : step.max_pages].long()
    page_bytes = step.representations[_CODES][layer_id, 0].numel() * len(table)
    grouped = query.unflatten(1, (step.policy.kv.num_kv_heads, -1))
    sums = grouped.sum(-1)[..., None, None]
    scores = []
    for block in table.split(max(1, _BLOCK // page_bytes), dim=1):
        code = step.representations[_CODES][layer_id, block]  # [B, P, S, Hkv, D / 2]
        levels = torch.cat([code & 15, code >> 4], -1)[..., : query.shape[-1]]
        low, width = step.representations[_RANGES][layer_id, block].float().unbind(-1)
        inner = torch.einsum("bhgd,bpshd->bhgps", grouped, levels.float())
        width, low = (x.permute(0, 3, 1, 2)[:, :, None] for x in (width, low))
        logits = cap_logits(inner * width + sums * low, step.policy.logit_cap)
        scores.append(logits.logsumexp(-1).flatten(1, 2))
    return torch.cat(scores, -1)
