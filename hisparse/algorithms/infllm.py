"""InfLLM-V2: MiniCPM's selection by means of keys. https://arxiv.org/abs/2509.24663

As in SGLang's ``layers/attention/minicpm``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, pad

from hisparse.algorithms.base import Representation, register_algorithm
from hisparse.algorithms.dsa import QUERY_BLOCK, SCORE_BYTES, index_width, inputs_of
from hisparse.algorithms.msa import tokens_of
from hisparse.algorithms.page_score import RankedPagesAlgorithm
from hisparse.algorithms.step import DecodeStep, PrefillStep, SelectionPolicy
from hisparse.kernels import SelectRule, select
from hisparse.types import IndexerInputs, Selection, SelectionScope

_MEAN = "mean_key"


@register_algorithm("infllm")
@dataclass(frozen=True, kw_only=True)
class InfLLM(RankedPagesAlgorithm):
    """Attends the blocks whose mean keys weigh most, as MiniCPM is trained to.

    A block is a page. A query's weights of the means of every ``kernel_size`` keys, one for each
    ``kernel_stride`` tokens, are a softmax for each query head. They are added over the heads of a
    KV head, and a block's score is the largest of the means that overlap it. Means cross pages, so
    a page keeps those of ``kernel_stride`` tokens, of which they are means in turn. Contexts within
    ``budget``, the model's ``dense_len``, are attended densely.

    Attributes:
        blocks: attended by a query, its own included.
        kernel_size: tokens of a mean.
        kernel_stride: tokens from a mean to the next.
    """

    blocks: int = 96
    kernel_size: int = 32
    kernel_stride: int = 16

    scopes: ClassVar[tuple[SelectionScope, ...]] = ("kv_head",)
    variable_lengths: ClassVar[bool] = True
    indexer: ClassVar[str] = "infllm"
    store_version: ClassVar[int | None] = 1
    captured_launches: ClassVar[int] = 28

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"blocks: got {self.blocks}, expected at least 1")
        if self.kernel_stride < 1 or self.kernel_size < 1 or self.kernel_size % self.kernel_stride:
            raise ValueError(
                f"kernel_size: got {self.kernel_size}, expected a multiple of kernel_stride, "
                f"{self.kernel_stride}"
            )

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        """The mean key of every ``kernel_stride`` tokens; of fewer, their sum by that number."""
        size, width = policy.kv.page_size, index_width(policy, self.indexer, "MiniCPM")
        shape = size // self._stride(size), policy.kv.num_kv_heads, width
        return {_MEAN: Representation(shape, torch.float32, source="model")}

    def captured_bytes(self, policy: SelectionPolicy, num_pages: int) -> int:
        """The means of all tokens, twice, and their logits and weights for each query head."""
        width = 2 * policy.heads * policy.kv.index_head_dim + 7 * policy.kv.num_q_heads
        size = policy.kv.page_size
        return 4 * width * (num_pages + 1) * (size // self._stride(size))

    def prefill_choices(self, policy: SelectionPolicy) -> int:
        pages = max(self._rule(policy).max_pages, policy.budget_pages) + 1
        # Attention packs those of a head at a time, in int64, before there are outputs.
        return (policy.heads + 2) * pages * policy.kv.page_size

    def construct_representations(
        self, keys: Tensor, queries: Tensor, layer_id: int, step: PrefillStep
    ) -> None:
        """Store the means of a chunk's keys; ``keys`` and ``queries`` are not read."""
        size, means = step.policy.kv.page_size, step.representations[_MEAN][layer_id]
        stride = self._stride(size)
        before = step.start % stride
        new = inputs_of(step, self.indexer).keys.float()
        new = pad(new, (0, 0, before, -step.end % stride)).unflatten(0, (-1, stride)).mean(1)
        at = torch.arange(step.start - before, step.end, stride, device=new.device)
        page = step.context_pages.long()[at // size]
        places, stored = page * (size // stride) + at % size // stride, means.flatten(0, 1)
        new = new.unflatten(1, (-1, means.shape[-1])).expand(-1, *means.shape[2:]).contiguous()
        if before:
            new[:1] += stored[places[:1]]
        stored.index_copy_(0, places, new)

    def update_indexer(
        self, inputs: IndexerInputs, layer_id: int, step: DecodeStep
    ) -> IndexerInputs:
        """Add the keys of the new tokens to the means."""
        means = step.representations[_MEAN][layer_id]
        stride = self._stride(step.policy.kv.page_size)
        stored = means.flatten(0, 1)
        places = step.once("places", lambda: step.host_slots // stride)
        begun = step.once("begun", lambda: (step.host_slots % stride > 0)[:, None, None])
        new = inputs.keys.float().unflatten(1, (-1, means.shape[-1])) / stride
        stored.index_copy_(0, places, torch.where(begun, stored[places], 0.0) + new)
        return inputs

    def update_representations(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: DecodeStep
    ) -> None:
        """Nothing: :meth:`update_indexer` has stored the page's means."""

    def score_pages(self, query: Tensor, layer_id: int, step: DecodeStep) -> Tensor:
        means, full = step.representations[_MEAN][layer_id], step.max_pages
        table = step.once("table", lambda: step.host_page_table[:, : full + 1].long())
        size = step.policy.kv.page_size
        hidden = step.once("hidden", lambda: self._hidden(step.seq_lens, table.shape[1], size))
        new = inputs_of(step, self.indexer).queries
        return self._score(new, means[table], hidden, step.policy.scale)[..., :full]

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        scores, rule = self.score_pages(queries, layer_id, step), self._rule(step.policy)
        return select(scores, step.num_pages, rule, forced=step.forced_pages)

    def select_prefill(self, layer_id: int, step: PrefillStep) -> Tensor | None:
        policy, table, size = step.policy, step.context_pages, step.policy.kv.page_size
        most = policy.budget_pages
        if (step.end - 1) // size <= most:
            return None
        new, rule = inputs_of(step, self.indexer).queries, self._rule(policy)
        means = step.representations[_MEAN][layer_id][table.long()][None]
        parts, block, width = [], QUERY_BLOCK, means.shape[1] * means.shape[2]
        if new.device.type != "cpu":
            # Of logits, weights and copies of them.
            block = max(1, SCORE_BYTES // (24 * new.shape[1] * width))
        page = torch.arange(most, dtype=torch.int32, device=table.device)
        position = torch.arange(step.start, step.end, dtype=torch.int32, device=table.device)
        for at, queries in zip(position.split(block), new.split(block), strict=True):
            before = at // size
            hidden = self._hidden(at + 1, len(table), size)
            scores = self._score(queries, means, hidden, policy.scale)
            forced = policy.forced_pages(before, len(table))
            pages = select(scores, before, rule, forced=forced).pages
            # Within the budget a query attends all pages.
            pages = pad(pages, (0, max(0, most - pages.shape[-1])), value=-1)
            every = pad(page, (0, pages.shape[-1] - most), value=len(table))
            every = torch.where(every < before[:, None], every, -1)[:, None]
            pages = torch.where((before <= most)[:, None, None], every, pages)
            parts.append(tokens_of(pages, at, size))
        return torch.cat(parts)

    def _rule(self, policy: SelectionPolicy) -> SelectRule:
        return policy.select_rule_with(max_pages=min(self.blocks - 1, policy.max_pages))

    def _stride(self, size: int) -> int:
        """Tokens from a mean to the next, as many as divide pages of ``size`` tokens."""
        return math.gcd(self.kernel_stride, size)

    def _hidden(self, lengths: Tensor, pages: int, size: int) -> Tensor:
        """``[B, 1, 1, N] bool``, which means of ``pages`` end after ``lengths [B]`` tokens."""
        stride = self._stride(size)
        # One at least, hidden: such pages are all attended.
        count = max(1, (pages * size - self.kernel_size) // stride + 1)
        end = torch.arange(count, device=lengths.device) * stride + self.kernel_size
        return (end > lengths[:, None])[:, None, None]

    def _score(self, queries: Tensor, means: Tensor, hidden: Tensor, scale: float) -> Tensor:
        """Scores of pages, some of them beyond the queries.

        Args:
            queries: ``[B, Hq, D]``, any float dtype.
            means: ``[B or 1, P, S / kernel_stride, Hkv, D] float32``.
            hidden: :meth:`_hidden` by the tokens up to each query's own.

        Returns:
            ``[B, Hkv, P] float32``, 0 to the query heads of a KV head.
        """
        parts, count = means.shape[2], hidden.shape[-1]
        grouped = (queries.float() * scale).unflatten(1, (means.shape[3], -1))
        keys = means.flatten(1, 2).permute(0, 2, 3, 1)
        logits = (
            grouped @ keys if len(keys) > 1 else torch.einsum("bhgd,hdn->bhgn", grouped, keys[0])
        )
        # Means of the means: of all their tokens.
        overlap = logits.shape[-1] - count + 1
        logits = torch.stack([logits[..., x : x + count] for x in range(overlap)]).mean(0)
        weights = logits.masked_fill(hidden, torch.finfo(torch.float32).min).softmax(-1)
        added = weights.masked_fill(hidden, 0.0).sum(2)
        return max_pool1d(pad(added, (overlap - 1,) * 2), parts + overlap - 1, parts)
