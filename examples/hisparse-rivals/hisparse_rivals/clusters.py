"""Centroids of a prompt's keys, and the one that each token belongs to, as a request keeps them."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from hisparse.algorithms import DecodeStep, PrefillStep, Representation, SelectionPolicy

from .entries import TokenLogitsAlgorithm

_CODES, _CENTROIDS = "codes", "centroids"


class ClusterAlgorithm(TokenLogitsAlgorithm):
    """Estimates a token's logit from centroids that are found when the prompt ends.

    A key has parts of D / M channels, each with centroids of its own. Two prompts that begin alike
    have other centroids, so requests cannot share codes: a request slot has those of ``tokens``
    tokens. Generated tokens get the nearest centroid there is.
    """

    tokens: int

    @abstractmethod
    def shape(self, head_dim: int) -> tuple[int, int]:
        """M, parts of a key, and C, the most centroids of a part."""

    @abstractmethod
    def fit(self, keys: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Find centroids of a prompt's keys.

        Args:
            keys: ``[Hkv, M, n, D / M] float32``, of full pages.
            most: C.

        Returns:
            Centroids ``[Hkv, M, C or less, D / M] float32``, and each key's ``[Hkv, M, n] int64``.
        """

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        kv = policy.kv
        parts, count = self.shape(kv.head_dim)
        codes, centroids = (parts, self.tokens), (parts, count, kv.head_dim // parts)
        dtype = torch.uint8 if count <= 256 else torch.int16
        return {
            _CODES: Representation((kv.num_kv_heads, *codes), dtype, "request"),
            _CENTROIDS: Representation((kv.num_kv_heads, *centroids), torch.bfloat16, "request"),
        }

    def construct_representations(
        self, keys: Tensor, queries: Tensor, layer_id: int, step: PrefillStep
    ) -> None:
        """Find centroids and codes when the prompt ends.

        ``keys [P, S, Hkv, D]`` and ``queries [T, Hq, D]`` are not read.
        """
        if step.end > self.tokens:
            raise ValueError(f"tokens: got {self.tokens}, expected the prompt's {step.end} or more")
        full = step.end - step.end % step.policy.kv.page_size
        if not step.is_last or not full:
            return
        codes, centroids = (
            step.representations[name][layer_id, step.slot] for name in (_CODES, _CENTROIDS)
        )
        every = torch.cat([part.clone() for _, part in step.context_keys(layer_id)])[:full].float()
        found, own = self.fit(split(every[None], centroids.shape[1])[0], centroids.shape[2])
        codes[..., :full] = own.to(codes.dtype)
        # The rest, if any, is the last one again.
        centroids.copy_(found[..., -1:, :].expand_as(centroids))
        centroids[..., : found.shape[-2], :] = found.to(centroids.dtype)

    def update_representations(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: DecodeStep
    ) -> None:
        """Code the tail pages ``keys [B, S, Hkv, D]``; those that are not full once more later."""
        centroids = step.representations[_CENTROIDS][layer_id][step.slots].float()
        codes = step.representations[_CODES][layer_id]
        found = nearest(split(keys.float(), centroids.shape[2]), centroids)
        place = torch.arange(keys.shape[1], device=keys.device)
        place = place + step.num_pages[:, None].long() * keys.shape[1]
        codes[step.slots[:, None], ..., place] = found.permute(0, 3, 1, 2).to(codes.dtype)

    def logits(self, query: Tensor, layer_id: int, step: DecodeStep) -> Tensor:
        size = step.policy.kv.page_size
        codes, centroids = (
            step.representations[name][layer_id].index_select(0, step.slots)
            for name in (_CODES, _CENTROIDS)
        )
        most = (step.max_pages + 1) * size  # The tail page is coded too.
        if most > self.tokens:
            raise ValueError(f"tokens: got {self.tokens}, expected {most} or more")
        parts = centroids.shape[2]
        products = torch.einsum(
            "bhgmd,bhmcd->bhgmc", query.unflatten(-1, (parts, -1)), centroids.float()
        )
        chosen = codes[..., : step.max_pages * size].long()[:, :, None]
        chosen = chosen.expand(-1, -1, query.shape[2], -1, -1)
        return products.gather(-1, chosen).sum(3).unflatten(-1, (-1, size))


def split(keys: Tensor, parts: int) -> Tensor:
    """``[B, n, Hkv, D]`` -> ``[B, Hkv, parts, n, D / parts]``."""
    return keys.unflatten(-1, (parts, -1)).permute(0, 2, 3, 1, 4)


def nearest(keys: Tensor, centroids: Tensor) -> Tensor:
    """``[..., n] int64``: the ``centroids [..., C, d]`` nearest to ``keys [..., n, d]``."""
    # The key's own square is the same for all.
    return (keys @ centroids.mT - centroids.square().sum(-1)[..., None, :] / 2).argmax(-1)


def evenly(keys: Tensor, count: int) -> Tensor:
    """``count`` of ``keys [..., n, d]`` in the middles of stretches of equal length."""
    place = (torch.arange(count, device=keys.device) * 2 + 1) * keys.shape[-2] // (2 * count)
    return keys[..., place, :]


def means(keys: Tensor, codes: Tensor, before: Tensor) -> Tensor:
    """The mean key of each cluster; of an empty one the centroid before.

    ``keys [..., n, d]``, ``codes [..., n] int64``, ``before [..., C, d]`` -> ``[..., C, d]``.
    """
    total = torch.zeros_like(before).scatter_add_(-2, codes[..., None].expand_as(keys), keys)
    count = torch.zeros_like(before[..., 0]).scatter_add_(-1, codes, torch.ones_like(keys[..., 0]))
    return torch.where(count[..., None] > 0, total / count.clamp(min=1)[..., None], before)
