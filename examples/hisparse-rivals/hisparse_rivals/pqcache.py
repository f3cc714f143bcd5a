"""PQCache: product quantisation of a prompt's keys. https://arxiv.org/abs/2407.12820"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hisparse.algorithms import register_algorithm

from .clusters import ClusterAlgorithm, evenly, means, nearest


@register_algorithm("pqcache")
@dataclass(frozen=True, kw_only=True)
class PQCache(ClusterAlgorithm):
    """Estimates logits from the nearest centroid of each part of a key (section 3.3).

    K-means by Euclidean distance for each KV head and part, from evenly spaced keys rather than
    random ones, so that it is the same each time. The paper bounds its iterations by the time that
    they may take, and leaves sinks out. A token takes ``parts`` bytes of each KV head, and a
    request ``2 D 2 ** bits`` more.

    Attributes:
        parts: of a key, a divisor of D; 2 in the paper.
        bits: of a code, 8 at most; 6 in the paper.
        iterations: of k-means.
        tokens: that a request may have.
    """

    parts: int = 2
    bits: int = 6
    iterations: int = 25
    tokens: int = 4608

    def __post_init__(self) -> None:
        for name, most in (("parts", 64), ("bits", 8), ("iterations", 1000), ("tokens", 2**20)):
            if not 1 <= (value := getattr(self, name)) <= most:
                raise ValueError(f"{name}: got {value}, expected 1 to {most}")

    def shape(self, head_dim: int) -> tuple[int, int]:
        if head_dim % self.parts:
            raise ValueError(f"parts: got {self.parts}, expected a divisor of {head_dim}")
        return self.parts, 1 << self.bits

    def fit(self, keys: Tensor, most: int) -> tuple[Tensor, Tensor]:
        found = evenly(keys, most)
        for _ in range(self.iterations):
            found = means(keys, nearest(keys, found), found)
        return found, nearest(keys, found)
