"""LOCKS: rank pages by low-rank approximations of their keys. github.com/Js-Hwang1/locks-kv

After release 0.1.4 of the package ``locks-kv``, its form for GQA models: summaries have the bytes
of its PyTorch code, and scores are its. docs/sketch.md compares it with ``sketch``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from hisparse.algorithms import (
    BaseSparseAlgorithm,
    DecodeStep,
    PrefillStep,
    Representation,
    Selection,
    SelectionPolicy,
    register_algorithm,
)
from hisparse.kernels import select


@register_algorithm("locks")
@dataclass(frozen=True, kw_only=True)
class Locks(BaseSparseAlgorithm):
    """Keeps the pages with the most attention, by the keys' largest directions in each page.

    A page of S tokens and one KV head takes ``(D / 2 + S + 2) rank + D + 2 S + 2`` bytes: 498 at
    D = 64 and S = 16. A GPU serves it without CUDA graphs, because eigenvectors cannot be captured.

    Attributes:
        rank: directions of a page that are kept, at most S - 1, or 1 in pages of one token.
        vote: how the query heads of a KV head agree. "locks": the sum of their exp(score - best
            score), over the pages that are not kept in any case. "softmax": as in ``sketch``, by
            shares of the softmax over all pages and the tail page.
    """

    store_version: ClassVar[int | None] = 1

    rank: int = 8
    vote: Literal["locks", "softmax"] = "locks"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank: got {self.rank}, expected at least 1")

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        kv = policy.kv
        heads, rank = kv.num_kv_heads, max(1, min(self.rank, kv.page_size - 1))
        return {
            "basis": Representation((heads, rank, -(-kv.head_dim // 2)), torch.uint8),
            "basis_scale": Representation((heads, rank), torch.bfloat16),
            "weights": Representation((heads, kv.page_size, rank), torch.int8),
            "weights_scale": Representation((heads, kv.page_size), torch.bfloat16),
            "mean": Representation((heads, kv.head_dim), torch.int8),
            "mean_scale": Representation((heads,), torch.bfloat16),
        }

    def store(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: PrefillStep | DecodeStep
    ) -> None:
        summary = make_summary(keys, step.representations["basis"].shape[-2])
        for name, values in summary._asdict().items():
            step.representations[name][layer_id, host_pages.long()] = values

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        policy = step.policy
        pages = step.host_page_table[:, : step.max_pages].long()
        stored = (step.representations[name][layer_id][pages] for name in Summary._fields)
        scores = approximate_scores(queries, Summary(*stored), policy.scale)
        rest = None
        if policy.heads < policy.kv.num_q_heads:
            if self.vote == "softmax":
                rest = step.tail_lse(layer_id, step.scaled(queries))
            else:
                page = torch.arange(step.max_pages, device=pages.device)
                kept = step.forced_pages | (page >= step.num_pages[:, None])
                scores = sum_of_heads(scores, kept, policy.kv.num_kv_heads)
        return select(
            scores, step.num_pages, policy.select_rule, forced=step.forced_pages, rest=rest
        )


class Summary(NamedTuple):
    """What is stored of pages: keys are about the mean plus weights times basis.

    Attributes:
        basis: ``[..., Hkv, rank, D / 2] uint8``, two signed numbers a byte, the even channel low.
        basis_scale: ``[..., Hkv, rank] bfloat16``.
        weights: ``[..., Hkv, S, rank] int8``.
        weights_scale: ``[..., Hkv, S] bfloat16``.
        mean: ``[..., Hkv, D] int8``.
        mean_scale: ``[..., Hkv] bfloat16``.
    """

    basis: Tensor
    basis_scale: Tensor
    weights: Tensor
    weights_scale: Tensor
    mean: Tensor
    mean_scale: Tensor


def make_summary(keys: Tensor, rank: int) -> Summary:
    """The summaries of pages.

    Args:
        keys: ``[P, S, Hkv, D]`` of any float dtype.
        rank: 1 to S.
    """
    keys = keys.transpose(1, 2).float()
    mean = keys.mean(2)
    centred = keys - mean[:, :, None]
    # A GPU leaves the keys of pages that are not full uninitialised. Where all keys are equal but
    # for rounding, LAPACK may find no vectors: such a page is its mean.
    found = torch.linalg.eigh((centred @ centred.mT).nan_to_num(0, 0, 0))
    squares, vectors = (x.nan_to_num(0, 0, 0) for x in found)
    first = squares.shape[-1] - rank
    length = squares[..., None, first:].clamp(min=1e-10).sqrt()
    vectors = vectors[..., first:]
    basis, basis_scale = _quantize((centred.mT @ vectors / length).mT, 7)
    weights, weights_scale = _quantize(vectors * length, 127)
    whole, mean_scale = _quantize(mean, 127)
    codes = torch.nn.functional.pad(basis.to(torch.int16) & 15, (0, basis.shape[-1] % 2))
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return Summary(packed, basis_scale, weights, weights_scale, whole, mean_scale)


def approximate_scores(query: Tensor, summary: Summary, scale: float) -> Tensor:
    """The log-sum-exp of the approximated logits of each page's tokens.

    Args:
        query: ``[B, Hq, D]`` of any float dtype, before the softmax scale; rounded to eight bits.
        summary: of ``[B, P]`` pages.
        scale: softmax scale.

    Returns:
        ``[B, Hq, P] float32``; higher is kept.
    """
    query = query.float().unflatten(1, (summary.mean.shape[2], -1))
    step = query.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
    query = (query / step).round() * step
    # Even and odd channels apart: the numbers of one byte stay in their byte.
    packed = summary.basis.transpose(1, 2).flatten(2, 3)
    even, odd = (packed << 4).view(torch.int8) >> 4, packed.view(torch.int8) >> 4
    along = query[..., 0::2] @ even.mT.float()
    along += query[..., 1::2] @ odd[..., : query.shape[-1] // 2].mT.float()
    along = along.unflatten(-1, summary.basis.shape[1::2])
    along *= summary.basis_scale.transpose(1, 2)[:, :, None]
    logits = torch.einsum("bphsr,bhgpr->bhgps", summary.weights.float(), along)
    logits *= summary.weights_scale.transpose(1, 2)[:, :, None]
    mean = query @ summary.mean.transpose(1, 2).mT.float()
    logits += (mean * summary.mean_scale.mT[:, :, None])[..., None]
    return (logits * scale).logsumexp(-1).flatten(1, 2)


def sum_of_heads(scores: Tensor, kept: Tensor, heads: int) -> Tensor:
    """One score for the query heads of each KV head, the logarithm of LOCKS' ``nrm``.

    Args:
        scores: ``[B, Hq, P]``.
        kept: ``[B, P] bool``, pages that are no choice: kept in any case, or absent. -inf for them.
        heads: Hkv.

    Returns:
        ``[B, Hkv, P] float32``.
    """
    scores = scores.masked_fill(kept[:, None], -torch.inf)
    best = scores.amax(-1, keepdim=True)
    found = (scores - best.masked_fill(best == -torch.inf, 0)).unflatten(1, (heads, -1))
    return found.logsumexp(2)


def _quantize(values: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Integers from ``-most - (most == 7)`` to ``most``, and a scale for each last dimension.

    LOCKS rounds by the scale in float32 and stores the scale in bfloat16. Only four bits use the
    lowest number.
    """
    scale = (values.abs().amax(-1) / most).clamp(min=1e-8)
    whole = (values / scale[..., None]).round().clamp(-most - (most == 7), most)
    return whole.to(torch.int8), scale.bfloat16()
