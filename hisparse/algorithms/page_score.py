"""Base classes of most algorithms: score pages, keep the best."""

from abc import abstractmethod

import torch
from torch import Tensor

from hisparse.algorithms.base import BaseSparseAlgorithm, Representation
from hisparse.algorithms.step import DecodeStep, PrefillStep, SelectionPolicy
from hisparse.errors import AlgorithmError
from hisparse.kernels import select, serial_operators
from hisparse.types import KVSpec, Selection


class RankedPagesAlgorithm(BaseSparseAlgorithm):
    """Keeps the pages with the highest scores.

    This class implements paging, sinks, recent pages, selections shared by heads, top-k and
    padding. A subclass writes and scores its representations itself, usually by kernels. Most
    algorithms subclass :class:`PageScoreAlgorithm` instead.
    """

    @abstractmethod
    def score_pages(self, query: Tensor, layer_id: int, step: DecodeStep) -> Tensor:
        """Score every page of the step's requests.

        Args:
            query: ``[B, Hq, D]``, model's dtype, before the softmax scale, ``step.policy.scale``.

        Returns:
            ``[B, heads, step.max_pages]`` of any float dtype; higher is kept. ``heads`` is a
            divisor of Hq. Entries without a page are ignored.
        """

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        # A subclass may score with large operators, which gain from PyTorch's threads.
        scores = self.score_pages(queries, layer_id, step)
        if not isinstance(scores, Tensor) or scores.shape[::2] != (len(queries), step.max_pages):
            got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise AlgorithmError(
                f"{type(self).__name__} ({type(self).__module__}), layer {layer_id}, score_pages: "
                f"got {got}, expected [{len(queries)}, heads, {step.max_pages}] for B requests and "
                "step.max_pages pages"
            )
        with serial_operators(queries.device):
            return select(scores, step.num_pages, step.policy.select_rule, forced=step.forced_pages)


class PageScoreAlgorithm(RankedPagesAlgorithm):
    """Keeps the pages with the highest scores, from one summary of each page.

    A subclass defines the summary (:meth:`summary_shape`, :meth:`summarize`) and how a query
    scores summaries (:meth:`score`).
    """

    @abstractmethod
    def summary_shape(self, kv: KVSpec) -> tuple[int, ...]:
        """Shape of the summary of one page in one layer."""

    @abstractmethod
    def summarize(self, keys: Tensor, mask: Tensor) -> Tensor:
        """Summarise pages; the engine stores summaries in the model's dtype.

        Args:
            keys: ``[P, S, Hkv, D]``, model's dtype.
            mask: ``[P, S] bool``, False: no token.

        Returns:
            ``[P, *summary]``, any dtype.
        """

    @abstractmethod
    def score(self, query: Tensor, summaries: Tensor) -> Tensor:
        """Score pages by their summaries.

        Args:
            query: ``[B, Hq, D]``, model's dtype, times the softmax scale.
            summaries: ``[B, P, *summary]``, model's dtype.

        Returns:
            ``[B, Hq or Hkv, P]`` of any float dtype; higher is kept.
        """

    def captured_bytes(self, policy: SelectionPolicy, num_pages: int) -> int:
        """The gathered summaries, and a copy that a product with the query may make of them."""
        summary = Representation(self.summary_shape(policy.kv), policy.kv.dtype)
        return 2 * num_pages * summary.num_bytes

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        return {"summary": Representation(self.summary_shape(policy.kv), policy.kv.dtype)}

    def store(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: PrefillStep | DecodeStep
    ) -> None:
        shape, device = keys.shape[:2], keys.device
        mask = step.once("mask", lambda: torch.ones(shape, dtype=torch.bool, device=device))
        summaries = step.representations["summary"][layer_id]
        summaries[host_pages] = self.summarize(keys, mask).to(summaries.dtype)

    def score_pages(self, query: Tensor, layer_id: int, step: DecodeStep) -> Tensor:
        table = step.host_page_table[:, : step.max_pages]
        entries = step.once("entries", lambda: table.flatten())
        summaries = step.representations["summary"][layer_id]
        gathered = summaries.index_select(0, entries).unflatten(0, table.shape)
        with serial_operators(query.device):
            query = query * step.policy.scale
        return self.score(query, gathered)


def tail_logits(query: Tensor, layer_id: int, step: DecodeStep) -> Tensor:
    """Logits of the tokens in the tail pages.

    Args:
        query: ``[B, Hq, D]`` of any float dtype, times the softmax scale.

    Returns:
        ``[B, Hq, S] float32``, -inf after the first ``step.tail_lens`` tokens.
    """
    keys = step.tail_keys(layer_id).permute(0, 2, 3, 1).float()
    grouped = query.float().unflatten(1, (keys.shape[1], -1))
    logits = (grouped @ keys).flatten(1, 2)
    token = torch.arange(logits.shape[-1], device=logits.device)
    absent = token >= step.tail_lens[:, None, None]
    seen: Tensor = logits.masked_fill(absent, -torch.inf)
    return seen
