"""ParisKV: keys rotated and rounded without calibration. https://arxiv.org/abs/2602.07721"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from hisparse.algorithms import (
    DecodeStep,
    PrefillStep,
    Representation,
    SelectionPolicy,
    register_algorithm,
)

from .entries import TokenLogitsAlgorithm, pack, read, unpack

#: Points of the numerical integral, and steps of Lloyd's iteration, far beyond its convergence.
_POINTS, _STEPS = 20_000, 500


@register_algorithm("pariskv")
@dataclass(frozen=True, kw_only=True)
class ParisKV(TokenLogitsAlgorithm):
    """Estimates logits from rotated keys whose directions are rounded in blocks of channels.

    The paper's reranking. A block's direction has a sign and a magnitude in each channel, whose
    levels are the best ones for a random direction; its weight makes the key's product with its
    own rounded direction exact. Left out, in its favour: the search for candidates before it, so
    all tokens are ranked; and each query head has its own logits, where the paper takes the mean
    query of a KV head. The rotation is a random orthogonal matrix, not one of Hadamard's. A token
    takes ``bits D / 8 + 2 D / block`` bytes of each KV head.

    Attributes:
        bits: of a channel: 4 in the paper. 1 is a sign alone.
        block: channels of a block: 8 in the paper. Made a divisor of D.
    """

    bits: Literal[1, 2, 4] = 4
    block: int = 8

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block: got {self.block}, expected at least 1")

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        kv, dim = policy.kv, policy.kv.head_dim
        tokens = kv.num_kv_heads, kv.page_size
        blocks = dim // math.gcd(self.block, dim)
        return {
            "codes": Representation((*tokens, dim * self.bits // 8), torch.uint8),
            "weights": Representation((*tokens, blocks), torch.bfloat16),
            "rotation": Representation((dim, dim), torch.float32, "layer"),
            "levels": Representation((1 << self.bits - 1,), torch.float32, "layer"),
        }

    def initialize(self, representations: Mapping[str, Tensor], policy: SelectionPolicy) -> None:
        dim = policy.kv.head_dim
        representations["rotation"].copy_(random_rotation(dim))
        levels = magnitudes(math.gcd(self.block, dim), 1 << self.bits - 1)
        representations["levels"].copy_(levels)

    def store(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: PrefillStep | DecodeStep
    ) -> None:
        kept = step.representations
        weights, levels = kept["weights"][layer_id], kept["levels"][layer_id]
        rotated = keys.transpose(1, 2).float() @ kept["rotation"][layer_id]
        codes, found = encode(rotated.unflatten(-1, (weights.shape[-1], -1)), levels)
        kept["codes"][layer_id, host_pages.long()] = pack(codes.flatten(-2), self.bits)
        weights[host_pages.long()] = found.bfloat16()

    def logits(self, query: Tensor, layer_id: int, step: DecodeStep) -> Tensor:
        codes, weights = (read(name, layer_id, step) for name in ("codes", "weights"))
        codes = unpack(codes, self.bits).unflatten(-1, (weights.shape[-1], -1))
        levels = step.representations["levels"][layer_id]
        keys = decode(codes, weights.float(), levels).flatten(-2)
        query = query @ step.representations["rotation"][layer_id]
        return torch.einsum("bhgd,bphsd->bhgps", query, keys)


@cache
def random_rotation(dim: int) -> Tensor:
    """An orthogonal matrix ``[dim, dim] float32``, the same in every process."""
    normal = torch.randn(dim, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.linalg.qr(normal).Q.float()


@cache
def magnitudes(block: int, count: int) -> Tensor:
    """Lloyd and Max's levels of |u|, a channel of a random direction of ``block`` channels.

    The density of |u| is proportional to ``(1 - u ** 2) ** ((block - 3) / 2)``.

    Returns:
        ``[count] float32``, ascending.
    """
    u = (torch.arange(_POINTS, dtype=torch.float64) + 0.5) / _POINTS
    density = (1 - u * u) ** ((block - 3) / 2)
    mass = density.cumsum(0) / density.sum()
    levels = u[torch.searchsorted(mass, (torch.arange(count) + 0.5).double() / count)]
    for _ in range(_STEPS):
        nearest = torch.bucketize(u, (levels[1:] + levels[:-1]) / 2)
        sums = torch.zeros(2, count, dtype=torch.float64)
        sums.index_add_(1, nearest, torch.stack([density * u, density]))
        levels = sums[0] / sums[1]
    return levels.float()


def encode(keys: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Round the directions of blocks.

    Args:
        keys: ``[..., blocks, block] float32``, rotated.
        levels: ``[n] float32``, magnitudes of a channel, ascending.

    Returns:
        Codes ``[..., blocks, block] int64``, twice the level's number, and 1 more where a
        channel is negative; and weights ``[..., blocks] float32``: a block is about its weight
        times the levels with their signs.
    """
    length = keys.norm(dim=-1, keepdim=True)
    size = keys.abs() / length.clamp(min=1e-8)
    number = torch.bucketize(size, (levels[1:] + levels[:-1]) / 2)
    own = (size * levels[number]).sum(-1)
    return number << 1 | (keys < 0), length[..., 0] / own.clamp(min=1e-6)


def decode(codes: Tensor, weights: Tensor, levels: Tensor) -> Tensor:
    """:func:`encode`, undone: ``[..., blocks, block] float32``, up to rounding."""
    signed = torch.stack([levels, -levels], -1).flatten()
    return signed[codes.long()] * weights[..., None]
