"""MSA: MiniMax-M3's indexer, which scores blocks of tokens by the best of their keys.

As in transformers' ``MiniMaxM3VLIndexer`` and SGLang's ``minimax_sparse_ops``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hisparse.algorithms.base import Representation, register_algorithm
from hisparse.algorithms.dsa import QUERY_BLOCK, SCORE_BYTES, index_width, inputs_of
from hisparse.algorithms.page_score import RankedPagesAlgorithm
from hisparse.algorithms.step import DecodeStep, PrefillStep, SelectionPolicy
from hisparse.kernels import (
    HostKeys,
    chunk_index_score,
    index_score,
    key_score,
    select,
    store_index_keys,
)
from hisparse.types import IndexerInputs, SelectionScope

_KEY = "index_key"


@register_algorithm("msa")
@dataclass(frozen=True, kw_only=True)
class MSA(RankedPagesAlgorithm):
    """Attends the blocks that MiniMax-M3's indexer scores highest, as in the model's training.

    A block is a page. Its score for a KV head is the largest ``query . key`` of its tokens, with
    the query of that head; heads share the keys. The page of the newest token is attended in any
    case. To attend as the model does, set ``page_size`` to the tokens of its blocks, ``budget`` to
    the tokens of those that it attends, and ``dense_layers`` to its layers without an indexer.

    Attributes:
        index_dtype: dtype of the stored keys.
    """

    index_dtype: Literal["bfloat16", "float32"] = "bfloat16"

    scopes: ClassVar[tuple[SelectionScope, ...]] = ("kv_head",)
    indexer: ClassVar[str] = "msa"
    store_version: ClassVar[int | None] = 1
    captured_launches: ClassVar[int] = 10

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        """The keys of the tokens of each page."""
        shape = policy.kv.page_size, index_width(policy, "msa", "MiniMax-M3")
        dtype = getattr(torch, self.index_dtype)
        return {_KEY: Representation(shape, dtype, source="model")}

    def captured_bytes(self, policy: SelectionPolicy, num_pages: int) -> int:
        """The places of all tokens, and their scores, for each head."""
        return 2 * 4 * policy.heads * (num_pages + 1) * policy.kv.page_size

    def prefill_choices(self, policy: SelectionPolicy) -> int:
        return policy.heads * (policy.max_pages + 1) * policy.kv.page_size

    def construct_representations(
        self, keys: Tensor, queries: Tensor, layer_id: int, step: PrefillStep
    ) -> None:
        """Store the keys of a chunk's tokens; ``keys`` and ``queries`` are not read."""
        size, pages = step.policy.kv.page_size, step.context_pages.long()
        position = torch.arange(step.start, step.end, device=pages.device)
        slots = pages[position // size] * size + position % size
        self._store_keys(inputs_of(step, "msa").keys, slots, layer_id, step)

    def update_indexer(
        self, inputs: IndexerInputs, layer_id: int, step: DecodeStep
    ) -> IndexerInputs:
        """Store the keys of the new tokens."""
        self._store_keys(inputs.keys, step.host_slots, layer_id, step)
        return inputs

    def _store_keys(
        self, keys: Tensor, slots: Tensor, layer_id: int, step: PrefillStep | DecodeStep
    ) -> None:
        """``keys [n, Di]`` of tokens with the host slots ``[n] int64``."""
        store_index_keys(keys, step.representations[_KEY][layer_id].flatten(0, 1), slots)

    def score_pages(self, query: Tensor, layer_id: int, step: DecodeStep) -> Tensor:
        new, keys = inputs_of(step, "msa"), step.representations[_KEY][layer_id]
        size, heads, full = step.policy.kv.page_size, new.queries.shape[1], step.max_pages
        if keys.device.type == "cpu":
            table = step.host_page_table[:, :full]
            return _best_in_place(new.queries, keys, table, step.num_pages)
        table = step.host_page_table[:, : full + 1]
        places = step.once("places", lambda: _places(table, size).repeat_interleave(heads, 0))
        counts = step.once("counts", lambda: (step.num_pages * size).repeat_interleave(heads))
        signs = step.once("signs", lambda: _signs(new.queries))
        scores = index_score(_signed(new.queries, signs), keys.flatten(0, 1), places, counts)
        best: Tensor = scores.view(-1, heads, full + 1, size).amax(-1)
        return best[..., :full]

    def select_prefill(self, layer_id: int, step: PrefillStep) -> Tensor | None:
        policy, table, size = step.policy, step.context_pages, step.policy.kv.page_size
        if (step.end - 1) // size <= policy.max_pages:
            return None
        new, keys = inputs_of(step, "msa"), step.representations[_KEY][layer_id]
        parts, block = [], QUERY_BLOCK
        if keys.device.type != "cpu":
            block = max(1, SCORE_BYTES // (4 * policy.heads * len(table) * size))
        position = torch.arange(step.start, step.end, dtype=torch.int32, device=table.device)
        for at, queries in zip(position.split(block), new.queries.split(block), strict=True):
            before = at // size
            scores = _best_of_prompt(queries, keys, table, before)
            forced = policy.forced_pages(before, len(table))
            chosen = select(scores, before, policy.select_rule, forced=forced)
            parts.append(tokens_of(chosen.pages, at, size))
        return torch.cat(parts)


def _best_of_prompt(queries: Tensor, keys: Tensor, table: Tensor, num_pages: Tensor) -> Tensor:
    """Scores of a prompt's pages: :func:`_best_in_place` with one ``table [P] int32`` for all."""
    if keys.device.type == "cpu":
        return _best_in_place(queries, keys, table.expand(len(queries), -1), num_pages)
    heads, size = queries.shape[1], keys.shape[1]
    counts = (num_pages * size).repeat_interleave(heads)
    new, places = _signed(queries, _signs(queries)), _places(table[None], size)[0]
    scores = chunk_index_score(new, keys.flatten(0, 1), places, counts)
    best: Tensor = scores.view(-1, heads, len(table), size).amax(-1)
    return best


def _best_in_place(queries: Tensor, keys: Tensor, table: Tensor, num_pages: Tensor) -> Tensor:
    """The largest product of a query with the keys of each page, on a CPU.

    Args:
        queries: ``[B, Hi, Di]``, any float dtype.
        keys: ``[host pages, S, Di]``, bfloat16 or float32.
        table: ``[B, P] int32``.
        num_pages: ``[B] int32``.

    Returns:
        ``[B, Hi, P] float32``; what stands after the first ``num_pages`` means nothing.
    """
    stored = HostKeys(keys[:, None])
    return key_score(queries.float().contiguous(), stored, table.contiguous(), num_pages)


def _places(table: Tensor, size: int) -> Tensor:
    """``[B, P] int32`` -> ``[B, P * S] int32``, the tokens of pages of ``size`` tokens."""
    offset = torch.arange(size, dtype=torch.int32, device=table.device)
    return (table[..., None] * size + offset).flatten(1)


def _signs(queries: Tensor) -> Tensor:
    """``[2]``, 1 and -1 in the dtype of the queries."""
    return 1 - 2 * torch.arange(2, dtype=queries.dtype, device=queries.device)


def _signed(queries: Tensor, signs: Tensor) -> IndexerInputs:
    """``[B, Hi, Di]`` as inputs of B * Hi rows whose index score is ``query . key``.

    Of two heads, the query and its negative, with weights 1 and -1: ``relu(x) - relu(-x)`` is x.
    """
    both = (queries[:, :, None] * signs[:, None]).flatten(0, 1)
    return IndexerInputs(both, both[:, 0], signs.expand(len(both), 2))


def tokens_of(pages: Tensor, position: Tensor, size: int) -> Tensor:
    """The tokens of chosen pages, and those of a query's own page up to its own.

    Args:
        pages: ``[T, H, K] int32``, padded with -1.
        position: ``[T] int32``, of each query.
        size: S, tokens of a page.

    Returns:
        ``[T, H, (K + 1) * S] int32``, -1 where there is none.
    """
    offset = torch.arange(size, dtype=torch.int32, device=pages.device)
    chosen = torch.where(pages[..., None] < 0, -1, pages[..., None] * size + offset)
    own = (position - position % size)[:, None] + offset
    own = torch.where(own <= position[:, None], own, -1)
    return torch.cat([chosen.flatten(2), own[:, None].expand(-1, pages.shape[1], -1)], 2)
