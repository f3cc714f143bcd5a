"""DSA: DeepSeek-V3.2's lightning indexer. https://arxiv.org/abs/2512.02556"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hisparse.algorithms.base import BaseSparseAlgorithm, Representation, register_algorithm
from hisparse.algorithms.step import DecodeStep, PrefillStep, SelectionPolicy
from hisparse.errors import ConfigError, HiSparseError
from hisparse.kernels import chunk_index_score, index_score, select, store_index_keys
from hisparse.types import IndexerInputs, Selection, SelectionScope

#: Queries of a prompt per block at least, and bytes of their scores on a GPU at most.
QUERY_BLOCK, SCORE_BYTES = 64, 64 << 20

_KEY, _SCALE = "index_key", "index_scale"


@register_algorithm("dsa")
@dataclass(frozen=True, kw_only=True)
class DSA(BaseSparseAlgorithm):
    """Attends the tokens that DeepSeek-V3.2's indexer scores highest, as in the model's training.

    A token's score is ``sum_h weights_h * relu(queries_h . key)`` (equation 1 of the paper). All
    heads share one selection; in prefill each query has its own. To attend as the model does, set
    ``budget`` to its ``index_topk``, and ``num_sink_pages`` and ``num_recent_pages`` to 0, so that
    only the best tokens are kept.

    Attributes:
        index_dtype: dtype of the stored keys. Each fp8 key has a power of two as scale, as in
            DeepSeek ("ue8m0"); queries are not rounded.
    """

    index_dtype: Literal["float8_e4m3fn", "bfloat16", "float32"] = "float8_e4m3fn"

    scopes: ClassVar[tuple[SelectionScope, ...]] = ("layer",)
    page_sizes: ClassVar[tuple[int, ...] | None] = (1,)
    indexer: ClassVar[str] = "dsa"
    ranks_tail: ClassVar[bool] = True
    store_version: ClassVar[int | None] = 1
    captured_launches: ClassVar[int] = 8

    #: A model with such an indexer, for messages.
    _MODEL: ClassVar[str] = "DeepSeek-V3.2"

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        width = index_width(policy, self.indexer, self._MODEL)
        kinds = {_KEY: Representation((width,), self._dtype, source="model")}
        if self._scaled:
            kinds[_SCALE] = Representation((), torch.float32, source="model")
        return kinds

    def prefill_choices(self, policy: SelectionPolicy) -> int:
        return policy.max_pages

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.index_dtype)
        return dtype

    @property
    def _scaled(self) -> bool:
        return self._dtype.itemsize == 1

    def store(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: PrefillStep | DecodeStep
    ) -> None:
        """Write the indexer's keys ``[T, Di]`` of new tokens, which are pages of one token each.

        ``keys`` are not read; ``host_pages [T]``, int32 or int64, are the entries to write.
        """
        stored, scales = self._stored(layer_id, step)
        store_index_keys(inputs_of(step, self.indexer).keys, stored, host_pages, scales=scales)

    def _stored(
        self, layer_id: int, step: PrefillStep | DecodeStep
    ) -> tuple[Tensor, Tensor | None]:
        """A layer's keys ``[host pages, Di]``, and their scales if they have any."""
        stored = step.representations
        return stored[_KEY][layer_id], stored[_SCALE][layer_id] if self._scaled else None

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        policy, scores = step.policy, self._score(layer_id, step)
        # The tail page is ranked with the others, but never listed: a selection that is shorter
        # means that it is attended.
        rule = policy.select_rule_with(drop_last=True)
        count = step.once("count", lambda: step.num_pages + 1)
        forced = step.once("forced", lambda: _forced(count, scores.shape[2], policy))
        return select(scores, count, rule, forced=forced)

    def _score(self, layer_id: int, step: DecodeStep) -> Tensor:
        """``[B, 1, P] float32``, the tail page's score at ``num_pages``."""
        table = step.host_page_table[:, : step.max_pages + 1]
        keys, scales = self._stored(layer_id, step)
        return index_score(
            inputs_of(step, self.indexer), keys, table, step.num_pages, scales=scales
        )

    def select_prefill(self, layer_id: int, step: PrefillStep) -> Tensor | None:
        size, table = step.policy.kv.page_size, step.context_pages
        new = inputs_of(step, self.indexer)
        if step.end // size <= step.policy.max_pages:
            return None
        keys, scales = self._stored(layer_id, step)
        seen = torch.arange(step.start + 1, step.end + 1, dtype=torch.int32, device=table.device)
        counts, width, parts = seen // size, len(table), []
        # Small blocks stay in a CPU's cache; a GPU takes all queries in a launch where it can.
        block = QUERY_BLOCK if table.device.type == "cpu" else SCORE_BYTES // (4 * width)
        for part in _blocks(step.length, max(block, QUERY_BLOCK)):
            given = (new.take(part), keys, table, counts[part])
            scores = chunk_index_score(*given, scales=scales)
            forced = _forced(counts[part], width, step.policy)
            chosen = select(scores, counts[part], step.policy.select_rule, forced=forced)
            parts.append(_tokens(chosen.pages[:, 0], seen[part], size))
        return torch.cat(parts)


def index_width(policy: SelectionPolicy, algorithm: str, model: str) -> int:
    """Di of the model's indexer.

    Args:
        policy: shapes of the model.
        algorithm: its name, for the message.
        model: a model with such an indexer.

    Raises:
        ConfigError: the model has none.
    """
    if policy.kv.index_head_dim:
        return policy.kv.index_head_dim
    raise ConfigError(
        f"algorithm {algorithm} got a model without an indexer, expected one such as {model}; "
        "algorithms for any model: sketch, quest, snapkv"
    )


def inputs_of(step: PrefillStep | DecodeStep, algorithm: str) -> IndexerInputs:
    """What the model's indexer gives for the step's tokens; an error if it gives nothing."""
    if step.indexer is not None:
        return step.indexer
    raise HiSparseError(
        f"algorithm {algorithm} got no indexer inputs from the model, expected queries, keys and "
        "weights of every token"
    )


def _forced(count: Tensor, width: int, policy: SelectionPolicy) -> Tensor | None:
    """``[N, P] bool``, the sinks and recents of the first ``count [N]`` pages, or None.

    The last of these pages is the tail page. It is kept if recent pages are.
    """
    if not policy.num_sink_pages and not policy.num_recent_pages:
        return None
    forced = policy.forced_pages(count - 1, width)
    if policy.num_recent_pages:
        last = (count.long()[:, None] - 1).clamp(min=0)
        forced = forced.scatter(1, last, True)
    return forced


def _tokens(pages: Tensor, seen: Tensor, size: int) -> Tensor:
    """The tokens of chosen full pages, and all of the page that is not full.

    Args:
        pages: ``[T, K] int32``, padded with -1.
        seen: ``[T] int32``, tokens that each query sees.
        size: S, tokens of a page.

    Returns:
        ``[T, K * S + S - 1] int32``, -1 where there is none.
    """
    if size == 1:
        return pages
    offset = torch.arange(size, dtype=torch.int32, device=pages.device)
    chosen = torch.where(pages[..., None] < 0, -1, pages[..., None] * size + offset)
    rest = (seen - seen % size)[:, None] + offset[:-1]
    return torch.cat([chosen.flatten(1), torch.where(rest < seen[:, None], rest, -1)], 1)


def _blocks(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
