"""QSA: Qwen4's indexer, which scores blocks of tokens by the mean of their keys.

As in transformers' ``Qwen4ExpTextQSAIndexer`` and SGLang's ``QSAIndexer``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor

from hisparse.algorithms.base import Representation, register_algorithm
from hisparse.algorithms.dsa import DSA, inputs_of
from hisparse.algorithms.step import DecodeStep, PrefillStep, SelectionPolicy
from hisparse.kernels import store_index_keys
from hisparse.types import BlockIndexerInputs, IndexerInputs

_PENDING, _POSITION = "pending_key", "pending_position"


@register_algorithm("qsa")
@dataclass(frozen=True, kw_only=True)
class QSA(DSA):
    """Attends the blocks that Qwen4-Exp's indexer scores highest, as in the model's training.

    A block is a page. The scores are those of :class:`DSA`, with a key for each full page. Each
    query attends ``budget`` tokens of full pages and the tokens of the page that is not full.
    To attend as the model does, set ``page_size`` to its ``indexer_compress_ratio``, ``budget`` to
    its ``indexer_budget``, and ``num_sink_pages`` and ``num_recent_pages`` to 0.

    Attributes:
        index_dtype: dtype of the stored keys.
    """

    index_dtype: Literal["float8_e4m3fn", "bfloat16", "float32"] = "bfloat16"

    page_sizes: ClassVar[tuple[int, ...] | None] = None
    indexer: ClassVar[str] = "qsa"
    #: 16, and those of the model's norm and rotation of a block's key.
    captured_launches: ClassVar[int] = 28
    _MODEL: ClassVar[str] = "Qwen4-Exp"

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        """The keys of full pages, and keys and positions of the tokens of each tail page."""
        size, width = policy.kv.page_size, policy.kv.index_head_dim
        # Without scales: a few tokens of each request.
        dtype = torch.bfloat16 if self._scaled else self._dtype
        return super().representations(policy) | {
            _PENDING: Representation((size, width), dtype, per="request", source="model"),
            _POSITION: Representation((size, 3), torch.int64, per="request", source="model"),
        }

    def prefill_choices(self, policy: SelectionPolicy) -> int:
        size = policy.kv.page_size
        return policy.max_pages * size + size - 1

    def construct_representations(
        self, keys: Tensor, queries: Tensor, layer_id: int, step: PrefillStep
    ) -> None:
        """Store the keys of the pages that a chunk completed, and the tokens of the tail page.

        ``keys`` and ``queries`` are not read.
        """
        new, size = cast(BlockIndexerInputs, inputs_of(step, "qsa")), step.policy.kv.page_size
        pending, positions = self._pending(layer_id, step)
        pending, positions = pending[step.slot], positions[step.slot]
        count = step.start % size
        tokens = torch.cat([pending[:count], new.keys.to(pending.dtype)])
        rotary = torch.cat([positions[:count], new.positions])
        full = len(tokens) // size * size
        if full:
            blocks = tokens[:full].unflatten(0, (-1, size))
            self._store_blocks(
                new.compress(blocks, rotary[:full:size]), step.host_pages, layer_id, step
            )
        pending[: len(tokens) - full] = tokens[full:]
        positions[: len(tokens) - full] = rotary[full:]

    def update_indexer(
        self, inputs: IndexerInputs, layer_id: int, step: DecodeStep
    ) -> IndexerInputs:
        """Store the tokens in their tail pages, and the keys of the pages that they fill."""
        new, size = cast(BlockIndexerInputs, inputs), step.policy.kv.page_size
        pending, positions = self._pending(layer_id, step)
        place = step.once("pending", lambda: step.slots * size + step.tail_lens - 1)
        pending.flatten(0, 1).index_copy_(0, place, new.keys.to(pending.dtype))
        positions.flatten(0, 1).index_copy_(0, place, new.positions)
        if step.filled is None:
            return inputs
        blocks = new.compress(pending[step.slots], positions[step.slots, 0]).to(new.keys.dtype)
        self._store_blocks(blocks, step.filled[1], layer_id, step)
        return IndexerInputs(new.queries, blocks, new.weights)

    def update_representations(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: DecodeStep
    ) -> None:
        """Nothing: :meth:`update_indexer` has stored the page's key, which its own token scores."""

    def _store_blocks(
        self, blocks: Tensor, host_pages: Tensor, layer_id: int, step: PrefillStep | DecodeStep
    ) -> None:
        keys, scales = self._stored(layer_id, step)
        store_index_keys(blocks, keys, host_pages, scales=scales)

    def _pending(self, layer_id: int, step: PrefillStep | DecodeStep) -> tuple[Tensor, Tensor]:
        """Keys ``[slots, S, Di]`` and positions ``[slots, S, 3]`` of tokens in tail pages."""
        kept = step.representations
        return kept[_PENDING][layer_id], kept[_POSITION][layer_id]

    def _score(self, layer_id: int, step: DecodeStep) -> Tensor:
        scores, size = super()._score(layer_id, step), step.policy.kv.page_size
        # A tail page that is not full has no key. It is attended in any case.
        last = step.once("last", lambda: step.num_pages.long()[:, None, None])
        unranked = step.once("unranked", lambda: _unranked(step.tail_lens, size))
        return scores.scatter_add_(2, last, unranked)


def _unranked(tail_lens: Tensor, size: int) -> Tensor:
    """``[B, 1, 1] float32``: -inf for a tail page that is not full, else 0."""
    added = torch.zeros_like(tail_lens, dtype=torch.float32)
    return added.masked_fill(tail_lens < size, -torch.inf)[:, None, None]
