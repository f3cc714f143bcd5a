"""What a forward pass is, as the coordinator and the algorithms see it.

A framework (SGLang, transformers) fills a :class:`PrefillBatch` or a :class:`DecodeBatch`; the
coordinator turns the former into one :class:`PrefillStep` per chunk and layer and the latter into
one :class:`DecodeStep` per way of attending: these are what algorithms see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hisparse.algorithms.request_indexes import RequestIndexes
from hisparse.types import IndexerInputs, KVSpec, PagedKV, SelectionScope

__all__ = [
    "DecodeBatch",
    "DecodeStep",
    "PageReader",
    "PrefillBatch",
    "PrefillChunk",
    "PrefillStep",
    "SelectionPolicy",
]


@dataclass(frozen=True, kw_only=True)
class SelectionPolicy:
    """What every selection has to keep to; the same for all layers and requests.

    Attributes:
        kv: shapes of the model.
        scope: for whom pages are selected: all heads together, a KV head or a query head.
        budget_pages: full pages that the budget holds; contexts of at most so many are attended
            whole.
        max_pages: K, pages that a selection may hold; the tail page comes on top. More than
            ``budget_pages`` where lengths vary.
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

    @property
    def heads(self) -> int:
        """H, the heads of a selection."""
        return self.kv.selection_heads(self.scope)


@dataclass(frozen=True, kw_only=True)
class PrefillChunk:
    """The part of one request's prompt that is computed in this forward.

    Attributes:
        slot: request slot.
        start: position of the first token; what stands before it is in host memory.
        length: number of tokens.
        offset: where the tokens begin in the forward's flat token dimension.
        host_pages: ``[ceil((start + length) / S)] int32``, host page of each page so far.
        is_last: whether the prompt ends here, as far as the framework knows.
    """

    slot: int
    start: int
    length: int
    offset: int
    host_pages: Tensor
    is_last: bool = True

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.length

    @cached_property
    def host_pages_cpu(self) -> Tensor:
        """``host_pages`` on the host, read back once: lists that it knows can be copied in runs."""
        return self.host_pages.cpu()


@dataclass(frozen=True, kw_only=True)
class PrefillBatch:
    """Chunks of several requests, their tokens one after the other.

    Attributes:
        chunks: one per request.
        host_slots: ``[T] int64``, host slot of each token.
    """

    chunks: Sequence[PrefillChunk]
    host_slots: Tensor


@dataclass(frozen=True, kw_only=True)
class DecodeBatch:
    """One new token for each of B requests.

    Attributes:
        slots: ``[B] int64``, request slots.
        slots_cpu: ``[B]``, the same on the host.
        seq_lens: ``[B] int64``, tokens including the new one.
        seq_lens_cpu: ``[B]``, the same on the host.
        host_slots: ``[B] int64``, host slot of the new token.
        host_page_table: ``[B, P] int32``, host page of each page of the sequences.
        num_real: ``[1] int32``, requests that are not padding, which comes last. With it the step
            can be captured: tensors alone say what the requests are, and ``seq_lens_cpu`` is the
            most tokens that each may have. None: all are real, the host knows them.
    """

    slots: Tensor
    slots_cpu: np.ndarray
    seq_lens: Tensor
    seq_lens_cpu: np.ndarray
    host_slots: Tensor
    host_page_table: Tensor
    num_real: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class PrefillStep:
    """One request's chunk in one layer; what algorithms receive.

    Attributes:
        policy: what a selection has to keep to.
        representations: by name, owned by the coordinator.
        slot: request slot.
        start: position of the chunk's first token.
        length: tokens of the chunk.
        first_page: page index of the first page that the chunk completed.
        host_pages: ``[P] int32``, where the pages that the chunk completed lie.
        context_pages: ``[ceil((start + length) / S)] int32``, host page of each page so far.
        is_last: whether the prompt ends here, as far as the framework knows.
        indexer: of the chunk's tokens, for algorithms that ask for it.
        read_context: see :meth:`context_keys`.
        indexes: what algorithms keep of a request in host memory.
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
            position of the first key, which begins a page, and keys ``[t, Hkv, D]``, valid until
            the next ones.
        """
        for position, keys, _ in self.read_context(layer_id):
            yield position, keys


class PageReader(Protocol):
    """Where steps read pages; the cache manager is one."""

    def tail_pages(self, layer_id: int, step: DecodeStep) -> PagedKV:
        """The tail pages, ``[B, Hkv, S, D]``."""
        ...

    def host_pages(self, layer_id: int) -> PagedKV:
        """The host pool, ``[host pages, Hkv, S, D]``."""
        ...

    def read_tokens(self, layer_id: int, host_slots: Tensor) -> tuple[Tensor, Tensor]:
        """K and V at ``host_slots [T]``, each ``[T, Hkv, D]`` on the device."""
        ...


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """Requests of one decode step that are attended in the same way; what algorithms receive.

    Attributes:
        policy: what a selection has to keep to.
        representations: name to ``[L, host pages, ...]``, owned by the coordinator.
        index: ``[B] int64``, which requests of the whole batch these are; None for all.
        slots: ``[B] int64``, request slots.
        rows: ``[R] int64``, state row of each (request, head).
        num_pages: ``[B] int32``, full pages before the tail page: what can be selected.
        seq_lens_cpu: ``[B]``, tokens of each request with the new one, on the host; of a step that
            is captured the most that it may have.
        tail_lens: ``[B] int32``, tokens in the tail page, the new one included; without it, so that
            there may be none, in a selection made ahead of the layer.
        host_page_table: ``[B, P] int32``.
        capacity: ``[R] int32``, slots of each row.
        num_real_rows: ``[1] int32``, rows that are not padding.
        tail_pages: ``[L, R] int32``, device page id of each row's tail page.
        tail_row_lens: ``[R] int32``, ``tail_lens`` of each row's request.
        pages: where keys are read.
        indexer: of the new tokens, in one layer, for algorithms that ask for it.
        indexes: what algorithms keep of a request in host memory.
    """

    policy: SelectionPolicy
    representations: Mapping[str, Tensor]
    index: Tensor | None
    slots: Tensor
    rows: Tensor
    num_pages: Tensor
    seq_lens_cpu: np.ndarray
    tail_lens: Tensor
    host_page_table: Tensor
    capacity: Tensor
    num_real_rows: Tensor
    tail_pages: Tensor
    tail_row_lens: Tensor
    pages: PageReader
    indexer: IndexerInputs | None = None
    indexes: RequestIndexes | None = None

    def tail_keys(self, layer_id: int) -> Tensor:
        """Keys of the tail pages, ``[B, S, Hkv, D]``: ``tail_lens`` of them count."""
        return self.pages.tail_pages(layer_id, self).k.transpose(1, 2)

    def host_keys(self, layer_id: int) -> Tensor:
        """Keys of the host pool, ``[host pages, Hkv, S, D]``, strides as the layout has them."""
        return self.pages.host_pages(layer_id).k

    @property
    def row_seq_lens(self) -> Tensor:
        """``[R] int32``, tokens of each row's request, the new one included."""
        seq_lens = self.num_pages * self.policy.kv.page_size + self.tail_lens
        return seq_lens.repeat_interleave(self.policy.heads)

    @property
    def max_pages(self) -> int:
        """The largest of ``num_pages``, known on the host."""
        return int(self.seq_lens_cpu.max() - 1) // self.policy.kv.page_size

    def take(self, who: np.ndarray) -> DecodeStep:
        """The requests with ``who [B] bool``, as a step of their own."""
        index = torch.from_numpy(np.flatnonzero(who)).to(self.rows.device)
        heads = self.policy.heads
        row_index = (index[:, None] * heads + index.new_tensor(range(heads))).flatten()
        return replace(
            self,
            index=index,
            slots=self.slots[index],
            rows=self.rows[row_index],
            num_pages=self.num_pages[index],
            seq_lens_cpu=self.seq_lens_cpu[who],
            tail_lens=self.tail_lens[index],
            host_page_table=self.host_page_table[index],
            capacity=self.capacity[row_index],
            num_real_rows=self.num_real_rows.new_full((1,), row_index.numel()),
            tail_pages=self.tail_pages[:, row_index],
            tail_row_lens=self.tail_row_lens[row_index],
            indexer=None if self.indexer is None else self.indexer.take(index),
        )
