"""ShadowKV: chunks by their mean key, odd ones in any case. https://arxiv.org/abs/2410.21465"""

from __future__ import annotations

import math
from dataclasses import dataclass

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

from .entries import read


@register_algorithm("shadowkv")
@dataclass(frozen=True, kw_only=True)
class ShadowKV(BaseSparseAlgorithm):
    """Keeps the pages whose mean keys, landmarks, have the largest share of the softmax.

    Algorithms 1 and 2 of the paper. A chunk has a landmark, and a page of several chunks their
    shares together; the largest of its query heads' counts. Pages with the least cosine between a
    landmark and a key of its chunk are outliers, attended in any case. Left out, in its favour:
    keys are exact, not of low rank. Outliers count in the budget, and are chosen anew in each step,
    from generated pages too. In bfloat16, 2 D bytes a chunk and KV head, and 2 a page.

    Attributes:
        chunk: tokens of a landmark; 8 in the paper. Made a divisor of the page.
        outliers: share of the pages that are outliers; the paper's 48 chunks of 128k tokens.
    """

    chunk: int = 8
    outliers: float = 0.003

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"chunk: got {self.chunk}, expected at least 1")
        if not 0 <= self.outliers <= 1:
            raise ValueError(f"outliers: got {self.outliers}, expected 0 to 1")

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        heads, size = policy.kv.num_kv_heads, policy.kv.page_size
        chunks = size // math.gcd(self.chunk, size)
        return {
            "landmark": Representation((heads, chunks, policy.kv.head_dim), torch.bfloat16),
            "cosine": Representation((heads,), torch.bfloat16),
        }

    def store(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: PrefillStep | DecodeStep
    ) -> None:
        chunks = step.representations["landmark"].shape[-2]
        for name, values in zip(("landmark", "cosine"), make_landmarks(keys, chunks), strict=True):
            step.representations[name][layer_id, host_pages.long()] = values.bfloat16()

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        query, heads = step.scaled(queries), step.policy.heads
        landmarks, cosines = (read(name, layer_id, step) for name in ("landmark", "cosine"))
        absent = torch.arange(step.max_pages, device=query.device) >= step.num_pages[:, None]
        scores = shares(query, landmarks, absent)
        scores = scores.unflatten(1, (heads, -1)).amax(2)
        odd = oddest(cosines.mT.float(), step.num_pages, self.outliers).float()
        # The outliers of the KV heads of a selection, or of the KV head of several.
        odd = odd.unflatten(1, (heads, -1)).amax(2) if heads <= odd.shape[1] else odd
        # A share is at most 1.
        scores = scores + 2 * odd.repeat_interleave(heads // odd.shape[1], 1)
        rule, forced = step.policy.select_rule, step.forced_pages
        return select(scores, step.num_pages, rule, forced=forced)


def make_landmarks(keys: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """Mean keys of chunks, and the least cosine between one and a key of its chunk.

    Args:
        keys: ``[P, S, Hkv, D]`` of any float dtype.
        chunks: C, of a page.

    Returns:
        ``[P, Hkv, C, D] float32`` and ``[P, Hkv] float32``.
    """
    keys = keys.float().transpose(1, 2).unflatten(2, (chunks, -1))
    mean = keys.mean(3)
    return mean, torch.cosine_similarity(keys, mean[:, :, :, None], dim=-1).amin((2, 3))


def shares(query: Tensor, landmarks: Tensor, absent: Tensor) -> Tensor:
    """The softmax over landmarks, added for each page.

    Args:
        query: ``[B, Hq, D] float32``, times the softmax scale.
        landmarks: ``[B, P, Hkv, C, D]`` of any float dtype.
        absent: ``[B, P] bool``, entries without a page.

    Returns:
        ``[B, Hq, P] float32``; higher is kept.
    """
    logits = torch.einsum(
        "bhgd,bphcd->bhgpc", query.unflatten(1, (landmarks.shape[2], -1)), landmarks.float()
    ).flatten(1, 2)
    logits = logits.masked_fill(absent[:, None, :, None], -torch.inf)
    return logits.flatten(2).softmax(-1).nan_to_num(0).view_as(logits).sum(-1)


def oddest(cosines: Tensor, num_pages: Tensor, share: float) -> Tensor:
    """The pages with the least cosines.

    Args:
        cosines: ``[B, Hkv, P] float32``.
        num_pages: ``[B] int32``, 0 to P.
        share: of each request's pages, rounded up.

    Returns:
        ``[B, Hkv, P] bool``.
    """
    absent = torch.arange(cosines.shape[-1], device=cosines.device) >= num_pages[:, None]
    order = cosines.masked_fill(absent[:, None], torch.inf).sort(dim=-1, stable=True).indices
    return order.argsort(-1) < (share * num_pages).ceil()[:, None, None]
