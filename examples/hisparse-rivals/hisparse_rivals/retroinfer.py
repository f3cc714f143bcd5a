"""RetroInfer: clusters of a prompt's keys. https://arxiv.org/abs/2505.02922"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import normalize

from hisparse.algorithms import register_algorithm

from .clusters import ClusterAlgorithm, evenly, means


@register_algorithm("retroinfer")
@dataclass(frozen=True, kw_only=True)
class RetroInfer(ClusterAlgorithm):
    """Gives all tokens of a cluster the logit of its centroid (section 4.2, the wave index).

    Spherical k-means of keys less their mean, one centroid for ``size`` tokens, from evenly spaced
    keys. With ``page_size`` 1 whole clusters are selected, as in the paper; larger pages are worth
    what their tokens' centroids say. A prompt is one segment, as in the paper up to 8k tokens; the
    centroids of generated tokens are the prompt's. Its estimation zone, clusters that are attended
    as their centroid and mean value, is nearest to ``tail_estimate``, by pages. A token takes 2
    bytes of each KV head (1 where there are up to 256 centroids), and a centroid 2 D.

    Attributes:
        size: mean tokens of a cluster; 16 in the paper.
        iterations: of k-means; 10 in the paper.
        tokens: that a request may have.
    """

    size: int = 16
    iterations: int = 10
    tokens: int = 4608

    def __post_init__(self) -> None:
        for name, most in (("size", 2**20), ("iterations", 1000), ("tokens", 2**18)):
            if not 1 <= (value := getattr(self, name)) <= most:
                raise ValueError(f"{name}: got {value}, expected 1 to {most}")

    def shape(self, head_dim: int) -> tuple[int, int]:
        return 1, -(-self.tokens // self.size)

    def fit(self, keys: Tensor, most: int) -> tuple[Tensor, Tensor]:
        middle = keys.mean(-2, keepdim=True)
        keys = keys - middle
        found = evenly(keys, max(1, min(most, keys.shape[-2] // self.size)))
        for _ in range(self.iterations - 1):
            found = normalize(means(keys, (keys @ found.mT).argmax(-1), found), dim=-1)
        own = (keys @ found.mT).argmax(-1)
        return means(keys, own, found) + middle, own
