"""ShadowKV: pages by their mean key, odd pages in any case. https://arxiv.org/abs/2410.21465"""

from __future__ import annotations

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
    """Keeps the pages whose mean key, the landmark, has the largest share of the softmax.

    Algorithms 1 and 2 of the paper: pages with the least cosine between landmark and a key are
    outliers, attended in any case, and a page's share is the largest of its query heads'. The
    paper's pages have 8 tokens. Left out, in its favour: keys are exact, not of low rank. Outliers
    count in the budget, and are chosen anew in each step, from generated pages too. In bfloat16,
    2 D + 2 bytes a page and KV head.

    Attributes:
        outliers: share of the pages that are outliers; the paper's 48 of 128k tokens.
    """

    outliers: float = 0.003

    def __post_init__(self) -> None:
        if not 0 <= self.outliers <= 1:
            raise ValueError(f"outliers: got {self.outliers}, expected 0 to 1")

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        heads = policy.kv.num_kv_heads
        return {
            "landmark": Representation((heads, policy.kv.head_dim), torch.bfloat16),
            "cosine": Representation((heads,), torch.bfloat16),
        }

    def store(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: PrefillStep | DecodeStep
    ) -> None:
        for name, values in zip(("landmark", "cosine"), make_landmarks(keys), strict=True):
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


def make_landmarks(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Mean keys of pages, and the least cosine between it and a key of the page.

    Args:
        keys: ``[P, S, Hkv, D]`` of any float dtype.

    Returns:
        ``[P, Hkv, D] float32`` and ``[P, Hkv] float32``.
    """
    keys = keys.float()
    mean = keys.mean(1)
    return mean, torch.cosine_similarity(keys, mean[:, None], dim=-1).amin(1)


def shares(query: Tensor, landmarks: Tensor, absent: Tensor) -> Tensor:
    """The softmax over landmarks.

    Args:
        query: ``[B, Hq, D] float32``, times the softmax scale.
        landmarks: ``[B, P, Hkv, D]`` of any float dtype.
        absent: ``[B, P] bool``, entries without a page.

    Returns:
        ``[B, Hq, P] float32``; higher is kept.
    """
    keys = landmarks.float().permute(0, 2, 3, 1)
    logits = (query.unflatten(1, (keys.shape[1], -1)) @ keys).flatten(1, 2)
    return logits.masked_fill(absent[:, None], -torch.inf).softmax(-1).nan_to_num(0)


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
