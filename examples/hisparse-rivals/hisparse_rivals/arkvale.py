"""ArkVale: pages as bounding volumes of keys. https://openreview.net/forum?id=4oAt5L4lYe"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.algorithms import (
    DecodeStep,
    PrefillStep,
    RankedPagesAlgorithm,
    Representation,
    SelectionPolicy,
    register_algorithm,
)

from .entries import read


@register_algorithm("arkvale")
@dataclass(frozen=True, kw_only=True)
class ArkVale(RankedPagesAlgorithm):
    """Keeps the pages whose cuboid has the largest possible q.k (section 4.2, "cuboid-mean").

    A page's cuboid reaches, in each channel, from the middle of its key range by the mean distance
    of its keys from there: narrower than Quest's, which holds all keys. In bfloat16, 4 D bytes a
    page and KV head. The paper's pages have 32 tokens. Its eviction is hisparse's device pages, and
    its heads share one selection; here each KV head has its own, and query heads agree as in
    ``quest``.
    """

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        shape = policy.kv.num_kv_heads, 2, policy.kv.head_dim
        return {"cuboid": Representation(shape, torch.bfloat16)}

    def store(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: PrefillStep | DecodeStep
    ) -> None:
        cuboids = step.representations["cuboid"][layer_id]
        cuboids[host_pages.long()] = make_cuboid(keys).to(cuboids.dtype)

    def score_pages(self, query: Tensor, layer_id: int, step: DecodeStep) -> Tensor:
        return largest_product(step.scaled(query), read("cuboid", layer_id, step))


def make_cuboid(keys: Tensor) -> Tensor:
    """``keys [P, S, Hkv, D]``, any float dtype -> ``[P, Hkv, 2, D] float32``, middle and radius."""
    keys = keys.float()
    middle = (keys.amax(1) + keys.amin(1)) / 2
    return torch.stack([middle, (keys - middle[:, None]).abs().mean(1)], 2)


def largest_product(query: Tensor, cuboids: Tensor) -> Tensor:
    """The largest q.k of a key in each cuboid.

    Args:
        query: ``[B, Hq, D] float32``, times the softmax scale.
        cuboids: ``[B, P, Hkv, 2, D]`` of any float dtype.

    Returns:
        ``[B, Hq, P] float32``; higher is kept.
    """
    # q.middle + |q|.radius, as one product.
    both = torch.stack([query, query.abs()], 2).flatten(2)
    volumes = cuboids.flatten(3).float().permute(0, 2, 3, 1)
    return (both.unflatten(1, (volumes.shape[1], -1)) @ volumes).flatten(1, 2)
