"""What the methods share: entries of pages, numbers of few bits, and logits estimated by token."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from hisparse.algorithms import BaseSparseAlgorithm, DecodeStep, Selection
from hisparse.kernels import select


def read(name: str, layer_id: int, step: DecodeStep) -> Tensor:
    """Entries of the step's pages, ``[B, max_pages, *shape]``."""
    table = step.host_page_table[:, : step.max_pages]
    entries = step.once("entries", lambda: table.flatten())
    return step.representations[name][layer_id].index_select(0, entries).unflatten(0, table.shape)


def pack(codes: Tensor, bits: int) -> Tensor:
    """``[..., n]``, integers of 1, 2 or 4 bits -> ``[..., n bits / 8] uint8``, the first lowest."""
    each = codes.to(torch.uint8).unflatten(-1, (-1, 8 // bits))
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return (each << shifts).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """:func:`pack`, undone: ``[..., n] uint8``."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


class TokenLogitsAlgorithm(BaseSparseAlgorithm):
    """Keeps the pages with the most attention by logits that a method estimates for each token.

    The papers select tokens, as a ``page_size`` of 1 does. A larger page is worth what the method
    estimates for all its tokens together: their log-sum-exp. Heads that share a selection agree by
    the softmax of these, over all pages and the tail page, as in ``sketch``.
    """

    @abstractmethod
    def logits(self, query: Tensor, layer_id: int, step: DecodeStep) -> Tensor:
        """Estimate the logits of all tokens in full pages.

        Args:
            query: ``[B, Hkv, G, D] float32``, times the softmax scale.

        Returns:
            ``[B, Hkv, G, max_pages, S] float32``.
        """

    def page_scores(
        self, queries: Tensor, layer_id: int, step: DecodeStep
    ) -> tuple[Tensor, Tensor]:
        """Estimated log-sum-exp of pages ``[B, Hq, max_pages]``; exact of the tails ``[B, Hq]``."""
        query = step.scaled(queries)
        grouped = query.unflatten(1, (step.policy.kv.num_kv_heads, -1))
        scores = self.logits(grouped, layer_id, step).logsumexp(-1)
        return scores.flatten(1, 2), step.tail_lse(layer_id, query)

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        scores, rest = self.page_scores(queries, layer_id, step)
        rule, forced = step.policy.select_rule, step.forced_pages
        return select(scores, step.num_pages, rule, forced=forced, rest=rest)
