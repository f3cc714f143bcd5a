"""What an algorithm sees of a forward: a chunk of a prompt, or a decode step; read-only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import Tensor

from hisparse.algorithms.request_indexes import RequestIndexes
from hisparse.kernels import SelectRule
from hisparse.types import IndexerInputs, KVSpec, SelectionScope

__all__ = ["DecodeStep", "PageReader", "PrefillStep", "SelectionPolicy"]


@dataclass(frozen=True, kw_only=True)
class SelectionPolicy:
    """The rules of every selection; the same for all layers and requests.

    Attributes:
        kv: shapes of the model.
        scope: who shares a selection: all heads, the query heads of a KV head, or nobody.
        budget_pages: full pages that the budget holds. A context of at most so many pages is
            attended whole.
        max_pages: K, the most pages that a selection may hold; the tail page comes on top. More
            than ``budget_pages`` where lengths vary.
        num_sink_pages: first pages of the sequence that are always selected.
        num_recent_pages: last full pages that are always selected.
        scale: factor between q.k and the attention logits.
    """

    kv: KVSpec
    scope: SelectionScope
    budget_pages: int
    max_pages: int
    num_sink_pages: int
    num_recent_pages: int
    scale: float

    @cached_property
    def heads(self) -> int:
        """H, the heads of a selection."""
        return self.kv.selection_heads(self.scope)

    @cached_property
    def rule(self) -> SelectRule:
        """The same for :func:`hisparse.kernels.select`, which keeps the best ``max_pages``."""
        return SelectRule(
            heads=self.heads,
            max_pages=self.max_pages,
            num_sinks=self.num_sink_pages,
            num_recents=self.num_recent_pages,
        )


@dataclass(frozen=True, kw_only=True)
class PrefillStep:
    """One request's chunk in one layer.

    Attributes:
        policy: the rules of every selection.
        representations: by name, owned by the coordinator.
        slot: request slot.
        start: position of the chunk's first token.
        length: tokens of the chunk.
        first_page: page index of the first page that the chunk completed.
        host_pages: ``[P] int32``, host pages of the pages that the chunk completed.
        context_pages: ``[ceil((start + length) / S)] int32``, host page of each page so far.
        is_last: whether the prompt ends here, as far as the framework knows.
        indexer: of the chunk's tokens, for algorithms that ask for it.
        read_context: see :meth:`context_keys`.
        indexes: host-memory indexes that algorithms keep for each request.
    """

    policy: SelectionPolicy
    representations: Mapping[str, Tensor]
    slot: int
    start: int
    length: int
    first_page: int
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
        """All keys up to ``end``, streamed from host memory once more.

        Yields:
            the position of the first key, which begins a page, and keys ``[t, Hkv, D]``, valid
            until the next iteration.
        """
        for position, keys, _ in self.read_context(layer_id):
            yield position, keys


class PageReader(Protocol):
    """Reads keys of the requests of a step."""

    def tail_keys(self, layer_id: int) -> Tensor:
        """Keys of the tail pages, ``[B, S, Hkv, D]``."""
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
        num_pages: ``[B] int32``, full pages before the tail page: those that can be selected.
        tail_lens: ``[B] int32``, tokens in the tail page, the new one included.
        max_pages: at least the largest of ``num_pages``, known on the host. In a captured step the
            pages of the longest context.
        host_page_table: ``[B, P] int32``, host page of each page; P is at least ``max_pages``.
        pages: reads keys.
        indexer: of the new tokens, in one layer, for algorithms that ask for it.
        indexes: host-memory indexes that algorithms keep for each request.
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

    @property
    def seq_lens(self) -> Tensor:
        """``[B] int32``, tokens of each request, the new one included."""
        return self.num_pages * self.policy.kv.page_size + self.tail_lens

    def tail_keys(self, layer_id: int) -> Tensor:
        """Keys of the tail pages, ``[B, S, Hkv, D]``: the first ``tail_lens`` of them count."""
        return self.pages.tail_keys(layer_id)

    def host_keys(self, layer_id: int) -> Tensor:
        """Keys of the host pool, ``[host pages, Hkv, S, D]``, strides as the layout has them."""
        return self.pages.host_keys(layer_id)
