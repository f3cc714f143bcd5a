"""What algorithms are told of a forward: a chunk of a prompt, or the requests of a decode step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from hisparse.kernels import SelectRule, TailPages, paged_attention, upload
from hisparse.kernels.sketch.op import tail_lse
from hisparse.types import AttentionRule, IndexerInputs, KVSpec, PagedKV, Selection, SelectionScope

T = TypeVar("T")

#: How a layer attends a request: "sparse", over the selected pages; "resident", densely, over a
#: context that fits the row's device pages; "streamed", densely, in tiles from host memory;
#: "window", over the last tokens, in a layer that attends no others.
AttentionMode = Literal["sparse", "resident", "streamed", "window"]


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
        device: type of the device that decodes, "cuda" or "cpu".
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
    device: str = "cuda"
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
        context_keys: streams all keys of a layer up to ``end`` from host memory. It yields the
            position of the first key, a multiple of S, and keys ``[t, Hkv, D]``, valid until the
            next iteration.
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
    context_keys: Callable[[int], Iterator[tuple[int, Tensor]]]

    @property
    def end(self) -> int:
        """Position after the chunk's last token."""
        return self.start + self.length


class KVReader(Protocol):
    """Reads keys and values for the requests of a step."""

    def find_tails(self, layer_id: int, step: DecodeStep) -> Tensor:
        """``[R] int32``, device page of each row's tail as of now."""
        ...

    def read_tails(self, layer_id: int, step: DecodeStep) -> PagedKV:
        """K and V of the tail pages, each ``[B, Hkv, S, D]``, in the model's dtype."""
        ...

    def tail_pages(self, layer_id: int, step: DecodeStep) -> TailPages:
        """The tail pages in place."""
        ...

    def host_pages(self, layer_id: int) -> PagedKV:
        """K and V of the host pool, each ``[host pages, Hkv, S, D]``."""
        ...

    def read_tokens(self, layer_id: int, host_slots: Tensor) -> PagedKV:
        """K and V at ``host_slots [T]``, each ``[T, Hkv, D]`` on the device."""
        ...


@dataclass
class StepCache:
    """What layers of a step pass on, and what the current one was given. It ends with the step.

    Attributes:
        indexer: see :attr:`DecodeStep.indexer`.
        selection: what the layers of the current group attend; None before the first one selects.
        values: what :meth:`DecodeStep.once` computed, by the algorithm's name for it.
        early: loads of pages that started before their layer, by layer.
    """

    indexer: IndexerInputs | None = None
    selection: Selection | None = None
    values: dict[str, Any] = field(default_factory=dict)
    early: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """Requests of a decode step: what selection, residency and attention know of them.

    All layers share it. The first attributes, up to ``kv_io``, are for algorithms.

    Attributes:
        policy: the rules of every selection.
        representations: name to ``[L, host pages, ...]``, owned by the coordinator.
        slots: ``[B] int64``, request slots.
        num_pages: ``[B] int32``, full pages before the tail page; only these can be selected.
        tail_lens: ``[B] int32``, tokens in the tail page, the new one included.
        max_pages: upper bound of ``num_pages``, known on the host; in a captured step, the pages of
            the longest context.
        host_page_table: ``[B, P] int32``, host page of each page; P is at least ``max_pages``.
        kv_io: reads keys and values.
        seq_lens_cpu: ``[B]``, tokens of each request, known on the host; in a captured step, the
            most that it may have.
        host_slots: ``[B] int64``, host slot of each new token.
        rows: ``[R] int64``, rows of the device tables; row ``b * H + h`` belongs to request b.
        capacity: ``[R] int32``, device slots of each row.
        row_tails: ``[L, R] int32``, device page of each row's tail; None: an earlier step of the
            forward may fill tail pages, so each layer finds them when it begins.
        row_tail_lens: ``[R] int32``, tokens in the row's tail page.
        num_real_rows: ``[1] int32``, rows before the padding.
        captured: whether this is a captured step, or one that warms up for the capture.
        dense: ``[B] bool``, requests of a sparse step that attend every page; None: none does.
        index: ``[B] int64``, places of the requests in the batch; None: they are the whole batch.
        places: ``[B]``, the same on the host.
        last: the last tokens of the requests, some of which have several tokens in the batch, one
            after the other; None: each request has one. Only the last token may fill a page.
        by_mode: the requests of a whole batch by attention mode, in layers that attend sparsely.
        dense_by_mode: the same, in layers that are always dense.
        cache: what layers pass on; the only attribute that changes during a step.
    """

    policy: SelectionPolicy
    representations: Mapping[str, Tensor]
    slots: Tensor
    num_pages: Tensor
    tail_lens: Tensor
    max_pages: int
    host_page_table: Tensor
    kv_io: KVReader
    seq_lens_cpu: np.ndarray
    host_slots: Tensor
    rows: Tensor
    capacity: Tensor
    row_tails: Tensor | None
    row_tail_lens: Tensor
    num_real_rows: Tensor
    captured: bool = False
    dense: Tensor | None = None
    index: Tensor | None = None
    places: np.ndarray | None = None
    last: DecodeStep | None = None
    by_mode: Mapping[AttentionMode, DecodeStep] = field(default_factory=dict)
    dense_by_mode: Mapping[AttentionMode, DecodeStep] = field(default_factory=dict)
    cache: StepCache = field(default_factory=StepCache, init=False, compare=False, repr=False)

    @property
    def indexer(self) -> IndexerInputs | None:
        """Of the new tokens in the current layer, for algorithms that declare ``indexer``."""
        return self.cache.indexer

    @cached_property
    def forced_pages(self) -> Tensor:
        """``[B, max_pages] bool``, sinks and recent pages; see :class:`SelectionPolicy`."""
        return self.policy.forced_pages(self.num_pages, self.max_pages)

    def once(self, name: str, find: Callable[[], T]) -> T:
        """What ``find`` returns, which is called in the first layer of the step only.

        An algorithm computes here what depends on the requests, not on the layer: each operator is
        a launch on a GPU.

        Args:
            name: of the value, among those of the algorithm.
            find: computes it.
        """
        if name not in self.cache.values:
            self.cache.values[name] = find()
        found: T = self.cache.values[name]
        return found

    @property
    def seq_lens(self) -> Tensor:
        """``[B] int32``, tokens of each request, the new one included."""
        return self.num_pages * self.policy.kv.page_size + self.tail_lens

    def tail_keys(self, layer_id: int) -> Tensor:
        """Keys of the tail pages, ``[B, S, Hkv, D]``; the first ``tail_lens`` tokens are valid."""
        return self.kv_io.read_tails(layer_id, self).k.transpose(1, 2)

    def tail_lse(self, layer_id: int, query: Tensor) -> Tensor:
        """Log-sum-exp of the logits of the first ``tail_lens`` tokens in the tail pages.

        The logits are capped as in attention.

        Args:
            layer_id: layer number.
            query: ``[B, Hq, D] float32``, times the softmax scale.

        Returns:
            ``[B, Hq] float32``.
        """
        rule = AttentionRule(1.0, self.policy.logit_cap)
        return tail_lse(query, self.tail_pages(layer_id), paged_attention, rule)

    def tail_pages(self, layer_id: int) -> TailPages:
        """The tail pages in place, for kernels that read them."""
        return self.kv_io.tail_pages(layer_id, self)

    def host_keys(self, layer_id: int) -> Tensor:
        """Keys of the host pool, ``[host pages, Hkv, S, D]``; strides depend on the layout."""
        return self.kv_io.host_pages(layer_id).k

    def every_page(self, width: int) -> Selection:
        """A selection of every full page, ``width`` entries wide."""
        pages = torch.arange(max(width, 1), dtype=torch.int32, device=self.num_pages.device)
        pages = torch.where(pages < self.num_pages[:, None], pages, -1)
        heads = self.policy.heads
        return Selection(
            pages[:, None].expand(-1, heads, -1), self.num_pages[:, None].expand(-1, heads)
        )

    def window_pages(self, window: int) -> Selection:
        """A selection of the full pages that the last ``window`` tokens of each request touch.

        Its width depends on the window alone, so that steps can be captured.

        Args:
            window: tokens, the new one included.
        """
        kv, heads = self.policy.kv, self.policy.heads
        first = (self.seq_lens - window).clamp(min=0) // kv.page_size
        width = max(1, kv.window_pages(window))
        pages = first[:, None] + torch.arange(width, dtype=torch.int32, device=first.device)
        pages = torch.where(pages < self.num_pages[:, None], pages, -1)
        # Contiguous, for all layers that use them.
        return Selection(
            pages[:, None].repeat(1, heads, 1), (self.num_pages - first)[:, None].repeat(1, heads)
        )

    def tails(self, layer_id: int) -> Tensor:
        """``[R] int32``, device page of each row's tail."""
        if self.row_tails is None:
            return self.kv_io.find_tails(layer_id, self)
        return self.row_tails[layer_id]

    def tail_slots(self, layer_id: int) -> Tensor:
        """``[R] int64``, where each row's new token goes: its tail page times S, plus offset."""

        def slots_in(tails: Tensor) -> Tensor:
            return tails.long() * self.policy.kv.page_size + (self.row_tail_lens - 1)

        tails = self.row_tails
        if tails is None:
            return slots_in(self.tails(layer_id))
        return self.once("tail slots", lambda: slots_in(tails))[layer_id]

    @cached_property
    def filled(self) -> tuple[Tensor, Tensor] | None:
        """The tail pages that the step fills; None: the host knows that there are none.

        Rows with a full tail page ``[R] bool``, and the host page of each full tail page
        ``[B] int64``, 0 for the other requests.
        """
        size = self.policy.kv.page_size
        if not self.captured and not (self.seq_lens_cpu % size == 0).any():
            return None
        rows = self.row_tail_lens == size
        if self.captured:
            rows &= torch.arange(len(rows), device=rows.device) < self.num_real_rows
        page = self.host_page_table.gather(1, self.num_pages.long()[:, None])[:, 0]
        full = rows.view(len(page), -1)[:, 0]
        return rows, torch.where(full, page, 0).long()

    def use_indexer(self, indexer: IndexerInputs) -> None:
        """Take the inputs of the whole batch in the layer that begins, for the parts too."""
        for part in (self, self.last, self.by_mode.get("sparse")):
            if part is not None:
                part.cache.indexer = indexer if part.index is None else indexer.take(part.index)

    def take(self, places: np.ndarray) -> DecodeStep:
        """The requests at ``places [n] int64`` of the step."""
        index = upload(places, self.rows.device)
        heads, seq_lens_cpu = self.policy.heads, self.seq_lens_cpu[places]
        rows = (index[:, None] * heads + torch.arange(heads, device=index.device)).flatten()
        return DecodeStep(
            policy=self.policy,
            representations=self.representations,
            slots=self.slots[index],
            num_pages=self.num_pages[index],
            tail_lens=self.tail_lens[index],
            max_pages=int(seq_lens_cpu.max() - 1) // self.policy.kv.page_size,
            host_page_table=self.host_page_table[index],
            kv_io=self.kv_io,
            seq_lens_cpu=seq_lens_cpu,
            host_slots=self.host_slots[index],
            rows=self.rows[rows],
            capacity=self.capacity[rows],
            row_tails=None if self.row_tails is None else self.row_tails[:, rows],
            row_tail_lens=self.row_tail_lens[rows],
            num_real_rows=self.num_real_rows.new_full((1,), rows.numel()),
            dense=None if self.dense is None else self.dense[index],
            index=index,
            places=places,
        )
