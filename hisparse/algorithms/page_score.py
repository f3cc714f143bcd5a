"""The base that most algorithms subclass: summarise pages, score the summaries, keep the best."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from hisparse.algorithms.base import BaseSparseAlgorithm, PageRun, Representation
from hisparse.batch import DecodeStep
from hisparse.types import KVSpec, Selection

__all__ = ["PageScoreAlgorithm", "all_pages", "combine_heads", "select_pages"]


class PageScoreAlgorithm(BaseSparseAlgorithm):
    """Keeps the pages with the highest scores.

    A subclass says what it remembers of a page (:meth:`summary_shape`, :meth:`summarize`) and how
    a query scores it (:meth:`score`); paging, sinks, recent pages, sharing a selection between
    heads, top-k and padding are done here.
    """

    @abstractmethod
    def summary_shape(self, kv: KVSpec) -> tuple[int, ...]:
        """Shape of the summary of one page in one layer."""

    @abstractmethod
    def summarize(self, keys: Tensor, mask: Tensor) -> Tensor:
        """``keys [P, S, Hkv, D]``, ``mask [P, S] bool`` (False: no token) -> ``[P, *summary]``."""

    @abstractmethod
    def score(self, query: Tensor, summaries: Tensor) -> Tensor:
        """``query [B, Hq, D]`` (times the softmax scale), ``summaries [B, P, *summary]``
        -> ``[B, Hq or Hkv, P]``; higher is kept.
        """

    def representations(self, kv: KVSpec) -> dict[str, Representation]:
        return {"summary": Representation(self.summary_shape(kv), kv.dtype)}

    def construct_representations(
        self, keys: Tensor, queries: Tensor, layer_id: int, pages: PageRun
    ) -> None:
        self._store(keys, pages.representations["summary"][layer_id], pages.host_pages)

    def update_representations(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, batch: DecodeStep
    ) -> None:
        self._store(keys, batch.representations["summary"][layer_id], host_pages)

    def _store(self, keys: Tensor, summaries: Tensor, host_pages: Tensor) -> None:
        mask = torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device)
        summaries[host_pages] = self.summarize(keys, mask).to(summaries.dtype)

    def retrieve_topk(self, queries: Tensor, layer_id: int, batch: DecodeStep) -> Selection:
        if batch.max_pages <= batch.policy.max_pages:
            return all_pages(batch, batch.policy.max_pages)
        table = batch.host_page_table[:, : batch.max_pages]
        summaries = batch.representations["summary"][layer_id]
        summaries = summaries.index_select(0, table.flatten()).unflatten(0, table.shape)
        scores = self.score(queries * batch.policy.scale, summaries)
        return select_pages(combine_heads(scores, batch), batch)


def all_pages(batch: DecodeStep, width: int) -> Selection:
    """The selection of every full page; ``width`` (K) is at least ``batch.max_pages``."""
    pages = torch.arange(width, dtype=torch.int32, device=batch.num_pages.device)
    pages = torch.where(pages < batch.num_pages[:, None], pages, -1)
    heads = batch.policy.heads
    return Selection(
        pages[:, None].expand(-1, heads, -1), batch.num_pages[:, None].expand(-1, heads)
    )


def combine_heads(scores: Tensor, batch: DecodeStep) -> Tensor:
    """Let the heads that share a selection agree on one score per page.

    Each head's scores become a softmax over its pages, then the shares of the group are added: a
    head with one peak counts as much as a head with many high logits, which raw sums or maxima
    do not give (measured: about a third less divergence from dense attention).

    Args:
        scores: ``[B, heads, P]``, in units of attention logits.
        batch: the step; its policy says how many heads a selection has.

    Returns:
        ``[B, H, P] float32``, -inf where there is no page.
    """
    pages = torch.arange(scores.shape[-1], device=scores.device)
    absent = (pages >= batch.num_pages[:, None])[:, None]
    scores = scores.float().masked_fill(absent, -torch.inf)
    heads = batch.policy.heads
    if scores.shape[1] < heads:
        return scores.repeat_interleave(heads // scores.shape[1], dim=1)
    if scores.shape[1] > heads:
        # A request without a full page is all -inf here: its softmax is NaN and is masked again.
        scores = scores.softmax(-1).unflatten(1, (heads, -1)).sum(2)
        scores = scores.masked_fill(absent, -torch.inf)
    return scores


def select_pages(scores: Tensor, batch: DecodeStep) -> Selection:
    """Sinks, recent pages and the best of the others, at most ``batch.policy.max_pages``.

    Args:
        scores: ``[B, H, P] float``, higher is kept, -inf where there is no page.
        batch: the step.

    Returns:
        pages in ascending order, which makes host reads sequential and the order of the sum in
        attention independent of the scores.
    """
    policy = batch.policy
    count = batch.num_pages[:, None]
    pages = torch.arange(scores.shape[-1], device=scores.device)
    forced = (pages < policy.num_sink_pages) | (pages >= count - policy.num_recent_pages)
    forced = forced & (pages < count)
    scores = scores.masked_fill(forced[:, None], torch.inf)
    width = min(policy.max_pages, scores.shape[-1])
    best = scores.topk(width, dim=-1, sorted=False)
    chosen = torch.where(best.values == -torch.inf, scores.shape[-1], best.indices)
    chosen = chosen.sort(dim=-1).values.to(torch.int32)
    lengths = count.clamp(max=width).expand(-1, scores.shape[1])
    chosen = chosen.masked_fill(chosen == scores.shape[-1], -1)
    return Selection(chosen, lengths)
