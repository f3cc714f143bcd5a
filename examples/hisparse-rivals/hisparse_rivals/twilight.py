"""Twilight: the fewest pages with a share p of the attention. https://arxiv.org/abs/2502.02770"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hisparse.algorithms import (
    DecodeStep,
    PrefillStep,
    Representation,
    Selection,
    SelectionPolicy,
    register_algorithm,
)
from hisparse.kernels import select

from .entries import TokenLogitsAlgorithm, pack, read, unpack

#: Farther from the best score than any page of a head: the top p alone says what is kept.
_ANY = 1e30


@register_algorithm("twilight")
@dataclass(frozen=True, kw_only=True)
class Twilight(TokenLogitsAlgorithm):
    """Keeps the fewest pages that have a share ``p`` of the attention, by keys of four bits.

    The paper's pruner (section 4.2) over all tokens, its "Full-Twilight". What a method before it
    would leave out is not left out, in its favour. Keys have four bits a channel and, for each
    token and head, a least value and a step in float16: D / 2 + 4 bytes. A page is kept if any
    query head of its selection needs it, up to ``device_buffer_size``, as in the paper's groups.

    Attributes:
        p: in (0, 1), share of the attention; it includes that of pages kept in any case.
    """

    variable_lengths: ClassVar[bool] = True

    p: float = 0.85

    def __post_init__(self) -> None:
        if not 0 < self.p < 1:
            raise ValueError(f"p: got {self.p}, expected more than 0 and less than 1")

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        tokens = policy.kv.num_kv_heads, policy.kv.page_size
        return {
            "codes": Representation((*tokens, policy.kv.head_dim // 2), torch.uint8),
            "range": Representation((*tokens, 2), torch.float16),
        }

    def store(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: PrefillStep | DecodeStep
    ) -> None:
        codes, span = encode(keys.transpose(1, 2))
        step.representations["codes"][layer_id, host_pages.long()] = pack(codes, 4)
        step.representations["range"][layer_id, host_pages.long()] = span

    def logits(self, query: Tensor, layer_id: int, step: DecodeStep) -> Tensor:
        codes, span = (read(name, layer_id, step) for name in ("codes", "range"))
        return torch.einsum("bhgd,bphsd->bhgps", query, decode(unpack(codes, 4), span))

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        scores, rest = self.page_scores(queries, layer_id, step)
        absent = torch.arange(step.max_pages, device=scores.device) >= step.num_pages[:, None]
        scores = scores.masked_fill(absent[:, None], -torch.inf)
        scores = scores.masked_fill(~top_p(scores, rest, step.forced_pages, self.p), -torch.inf)
        rule = step.policy.select_rule_with(within=_ANY)
        return select(scores, step.num_pages, rule, forced=step.forced_pages, rest=rest)


def encode(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Round each key to sixteen steps between its least and its largest number.

    Args:
        keys: ``[..., D]`` of any float dtype.

    Returns:
        Codes ``[..., D] float32``, 0 to 15, and least number and step ``[..., 2] float16``.
    """
    keys = keys.float()
    least, most = keys.amin(-1), keys.amax(-1)
    span = torch.stack([least, ((most - least) / 15).clamp(min=1e-4)], -1).half()
    low, step = span.float().split(1, -1)
    return ((keys - low) / step).round().clamp(0, 15), span


def decode(codes: Tensor, span: Tensor) -> Tensor:
    """:func:`encode`, undone: ``[..., D] float32``, up to rounding."""
    low, step = span.float().split(1, -1)
    return codes.float() * step + low


def top_p(scores: Tensor, rest: Tensor, forced: Tensor, p: float) -> Tensor:
    """The fewest pages of each head that, with what is attended in any case, have the share ``p``.

    Args:
        scores: ``[B, Hq, P] float32``, log-sum-exp of each page; -inf where there is none.
        rest: ``[B, Hq] float32``, of the tail page, which is always attended.
        forced: ``[B, P] bool``, pages that are always attended.
        p: in (0, 1).

    Returns:
        ``[B, Hq, P] bool``, without the forced pages.
    """
    weights = torch.cat([scores, rest[..., None]], -1).softmax(-1)[..., :-1].nan_to_num(0)
    chosen = weights.masked_fill(forced[:, None], 0)
    ranked = chosen.sort(-1, descending=True)
    free = chosen.sum(-1, keepdim=True)
    # What remains when a page's turn comes, if the heavier ones are kept.
    left = free - ranked.values.cumsum(-1) + ranked.values
    needed = (left > 1 - p) & (ranked.values > 0)
    return torch.zeros_like(needed).scatter_(-1, ranked.indices, needed)
