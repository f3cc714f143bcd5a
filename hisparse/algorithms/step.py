"""An algorithm's read-only view of a forward: a chunk of a prompt, or a decode step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from hisparse.algorithms.request_indexes import RequestIndexes
from hisparse.kernels import SelectRule, TailPages
from hisparse.types import AttentionRule, IndexerInputs, KVSpec, SelectionScope

__all__ = ["DecodeStep", "PageReader", "PrefillStep", "SelectionPolicy"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SelectionPolicy:
    """The rules of every selection; the same for all layers and requests.

    Attributes:
        kv: shapes of the model.
        scope: the heads that share a selection: all heads ("layer"), the query heads of a KV head
            ("kv_head"), or each query head alone ("query_head").
        budget_pages: full pages within the budget. A context of at most ``budget_pages`` full pages
            is attended densely.
        max_pages: K, the most pages of a selection, tail page not counted. Above ``budget_pages``
            for algorithms with ``variable_lengths``.
        num_sink_pages: first pages of the sequence that are always selected.
        num_recent_pages: last full pages that are always selected.
        scale: softmax scale: an attention logit is ``scale`` times q.k.
        logit_cap: cap on attention logits, see :class:`hisparse.types.AttentionRule`; 0: none.
        invalid_scores: ``[1] int64``, where the engine counts selections with a score that is NaN
            or +inf; None outside of an engine.
    """

    kv: KVSpec
    scope: SelectionScope
    budget_pages: int
    max_pages: int
    num_sink_pages: int
    num_recent_pages: int
    scale: float
    logit_cap: float = 0.0
    invalid_scores: Tensor | None = field(default=None, compare=False, repr=False)

    @cached_property
    def heads(self) -> int:
        """H, the heads of a selection."""
        return self.kv.selection_heads(self.scope)

    @cached_property
    def rule(self) -> SelectRule:
        """The policy as :func:`hisparse.kernels.select` takes it."""
        return SelectRule(
            heads=self.heads, max_pages=self.max_pages, invalid_scores=self.invalid_scores
        )

    @cached_property
    def attention(self) -> AttentionRule:
        """How layers without a window attend."""
        return AttentionRule(self.scale, self.logit_cap)

    @cached_property
    def rules(self) -> tuple[AttentionRule, ...]:
        """How each layer attends, ``[L]``."""
        return tuple(
            replace(self.attention, window=self.kv.window(layer))
            for layer in range(self.kv.num_layers)
        )

    def forced_pages(self, num_pages: Tensor, width: int) -> Tensor:
        """Sink pages and recent pages, which every selection has, whatever their scores.

        This method alone defines them. At most ``num_sink_pages + num_recent_pages`` of a request.

        Args:
            num_pages: ``[B] int32``, full pages of each request.
            width: P, at least the largest of ``num_pages``.

        Returns:
            ``[B, P] bool``.
        """
        page, count = torch.arange(width, device=num_pages.device), num_pages[:, None]
        forced = (page >= count - self.num_recent_pages) | (page < self.num_sink_pages)
        return forced & (page < count)


@dataclass(frozen=True, kw_only=True)
class PrefillStep:
    """One request's chunk in one layer.

    Attributes:
        policy: the rules of every selection.
        representations: by name, owned by the coordinator.
        slot: request slot.
        start: position of the chunk's first token.
        length: tokens of the chunk.
        host_pages: ``[P] int32``, host pages of the pages that the chunk completed.
        context_pages: ``[ceil((start + length) / S)] int32``, host page of each page so far.
        is_last: whether the prompt ends here, as far as the framework knows.
        indexer: indexer inputs of the chunk's tokens, for algorithms that declare ``indexer``.
        read_context: see :meth:`context_keys`.
        indexes: the algorithm's host-memory indexes of each request.
    """

    policy: SelectionPolicy
    representations: Mapping[str, Tensor]
    slot: int
    start: int
    length: int
    host_pages: Tensor
    context_pages: Tensor
    is_last: bool
    indexer: IndexerInputs | None
    read_context: Callable[[int], Iterator[tuple[int, Tensor, Tensor]]]
    indexes: RequestIndexes | None = None

    @property
    def end(self) -> int:
        """Position after the chunk's last token."""
        return self.start + self.length

    def context_keys(self, layer_id: int) -> Iterator[tuple[int, Tensor]]:
        """Stream all keys up to ``end`` from host memory.

        Yields:
            the position of the first key, a multiple of S, and keys ``[t, Hkv, D]``, valid until
            the next iteration.
        """
        for position, keys, _ in self.read_context(layer_id):
            yield position, keys


class PageReader(Protocol):
    """Reads keys for the requests of a step."""

    def tail_keys(self, layer_id: int) -> Tensor:
        """Keys of the tail pages, ``[B, S, Hkv, D]``."""
        ...

    def tail_lse(self, layer_id: int, query: Tensor, logit_cap: float) -> Tensor:
        """Log-sum-exp of the tail pages' capped logits, ``[B, Hq] float32``."""
        ...

    def tail_pages(self, layer_id: int) -> TailPages:
        """The tail pages in place."""
        ...

    def host_keys(self, layer_id: int) -> Tensor:
        """Keys of the host pool, ``[host pages, Hkv, S, D]``."""
        ...

    def read_keys(self, layer_id: int, host_slots: Tensor) -> Tensor:
        """Keys at ``host_slots [T]``, ``[T, Hkv, D]`` on the device."""
        ...


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """Requests of a decode step that select pages, in one layer.

    Attributes:
        policy: the rules of every selection.
        representations: name to ``[L, host pages, ...]``, owned by the coordinator.
        slots: ``[B] int64``, request slots.
        num_pages: ``[B] int32``, full pages before the tail page; only these can be selected.
        tail_lens: ``[B] int32``, tokens in the tail page, the new one included.
        max_pages: upper bound of ``num_pages``, known on the host; in a captured step, the pages of
            the longest context.
        host_page_table: ``[B, P] int32``, host page of each page; P is at least ``max_pages``.
        pages: reads keys.
        indexer: indexer inputs of the new tokens in one layer, for algorithms that declare
            ``indexer``.
        indexes: the algorithm's host-memory indexes of each request.
    """

    policy: SelectionPolicy
    representations: Mapping[str, Tensor]
    slots: Tensor
    num_pages: Tensor
    tail_lens: Tensor
    max_pages: int
    host_page_table: Tensor
    pages: PageReader
    indexer: IndexerInputs | None = None
    indexes: RequestIndexes | None = None

    @cached_property
    def forced_pages(self) -> Tensor:
        """``[B, max_pages] bool``, sinks and recent pages; see :class:`SelectionPolicy`."""
        return self.policy.forced_pages(self.num_pages, self.max_pages)

    @cached_property
    def _found(self) -> dict[str, Any]:
        return {}

    def once(self, name: str, find: Callable[[], T]) -> T:
        """What ``find`` returns, which is called in the first layer of the step only.

        An algorithm computes here what depends on the requests, not on the layer: each operator is
        a launch on a GPU.

        Args:
            name: of the value, among those of the algorithm.
            find: computes it.
        """
        if name not in self._found:
            self._found[name] = find()
        found: T = self._found[name]
        return found

    def with_indexer(self, indexer: IndexerInputs) -> DecodeStep:
        """The same requests in another layer, with all that was found :meth:`once`."""
        # Not replace, which would drop what is cached.
        step = copy(self)
        object.__setattr__(step, "indexer", indexer)
        return step

    @property
    def seq_lens(self) -> Tensor:
        """``[B] int32``, tokens of each request, the new one included."""
        return self.num_pages * self.policy.kv.page_size + self.tail_lens

    def tail_keys(self, layer_id: int) -> Tensor:
        """Keys of the tail pages, ``[B, S, Hkv, D]``; the first ``tail_lens`` tokens are valid."""
        return self.pages.tail_keys(layer_id)

    def tail_lse(self, layer_id: int, query: Tensor) -> Tensor:
        """Log-sum-exp of the logits of the first ``tail_lens`` tokens in the tail pages.

        The logits are capped as in attention.

        Args:
            layer_id: layer number.
            query: ``[B, Hq, D] float32``, times the softmax scale.

        Returns:
            ``[B, Hq] float32``.
        """
        return self.pages.tail_lse(layer_id, query, self.policy.logit_cap)

    def tail_pages(self, layer_id: int) -> TailPages:
        """The tail pages in place, for kernels that read them."""
        return self.pages.tail_pages(layer_id)

    def host_keys(self, layer_id: int) -> Tensor:
        """Keys of the host pool, ``[host pages, Hkv, S, D]``; strides depend on the layout."""
        return self.pages.host_keys(layer_id)
