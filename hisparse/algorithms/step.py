"""What algorithms get of a forward: a chunk of a prompt, or the requests of a decode step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from hisparse.kernels import DecodeRows, HostKeys, SelectRule, TailPages, paged_attention, upload
from hisparse.kernels.operation import new_tensors
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
        max_pages: K, the most pages of a selection, tail page not counted.
        variable_lengths: whether selections have as many pages as queries need, or ``max_pages``.
        tail_below: a full tail page is attended only beside fewer selected pages than this, because
            the algorithm ranks it with them; None: always.
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
    variable_lengths: bool = False
    tail_below: int | None = None
    logit_cap: float = 0.0
    device: str = "cuda"
    invalid_scores: Tensor | None = field(default=None, compare=False, repr=False)
    _rules: dict[Any, SelectRule] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @cached_property
    def heads(self) -> int:
        """H, the heads of a selection."""
        return self.kv.selection_heads(self.scope)

    @cached_property
    def select_rule(self) -> SelectRule:
        """The policy as :func:`hisparse.kernels.select` takes it."""
        return SelectRule(
            heads=self.heads, max_pages=self.max_pages, invalid_scores=self.invalid_scores
        )

    def select_rule_with(self, **changes: Any) -> SelectRule:
        """:attr:`select_rule` with other values of some fields; the same object each time."""
        key = tuple(changes.items())
        if key not in self._rules:
            self._rules[key] = replace(self.select_rule, **changes)
        return self._rules[key]

    @cached_property
    def attention_rule(self) -> AttentionRule:
        """How layers without a window attend."""
        return AttentionRule(self.scale, self.logit_cap)

    @cached_property
    def layer_rules(self) -> tuple[AttentionRule, ...]:
        """How each layer attends, ``[L]``."""
        rule, layers = self.attention_rule, range(self.kv.num_layers)
        return tuple(replace(rule, window=self.kv.window(layer)) for layer in layers)

    def forced_pages(self, num_pages: Tensor, width: int) -> Tensor:
        """``[B, P] bool``, sinks and recent pages, which every selection has for any scores.

        Args:
            num_pages: ``[B] int32``, full pages of each request.
            width: P, at least the largest of ``num_pages``.
        """
        page, count = torch.arange(width, device=num_pages.device), num_pages[:, None]
        forced = (page >= count - self.num_recent_pages) | (page < self.num_sink_pages)
        return forced & (page < count)


@dataclass(frozen=True, kw_only=True)
class PrefillStep:
    """One request's chunk in one layer.

    Attributes:
        policy: the rules of every selection.
        representations: name to tensor; :class:`Representation` gives shapes and dtypes.
        slot: request slot.
        start: position of the chunk's first token.
        length: tokens of the chunk.
        host_pages: ``[P] int32``, host pages of the pages that the chunk completed.
        context_pages: ``[ceil((start + length) / S)] int32``, host page of each page so far.
        is_last: whether the prompt ends here, as far as the framework knows.
        indexer: indexer inputs of the chunk's tokens, for algorithms that declare ``indexer``.
        context_keys: streams all keys of a layer up to ``end`` from host memory. It yields the
            position of the first key, a multiple of S, and keys ``[t, Hkv, D]``, model's dtype,
            valid until the next iteration.
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

    def once(self, name: str, find: Callable[[], T]) -> T:
        """The value of ``find()``: unlike a :class:`DecodeStep`, this one has one layer."""
        return find()


class KVReader(Protocol):
    """Reads keys and values for the requests of a step."""

    def find_tails(self, layer_id: int, step: DecodeStep) -> Tensor:
        """``[R] int32``, device page of each row's tail as of now."""

    def read_tails(self, layer_id: int, step: DecodeStep) -> PagedKV:
        """K and V of the tail pages, each ``[B, Hkv, S, D]``, in the model's dtype."""

    def tail_pages(self, layer_id: int, step: DecodeStep, *, with_new: bool) -> TailPages:
        """The tail pages in place."""

    def host_keys(self, layer_id: int) -> HostKeys:
        """Keys of the host pool, as they are stored."""

    def read_tokens(self, layer_id: int, host_slots: Tensor) -> PagedKV:
        """K and V at ``host_slots [T] int64``, ``[T, Hkv, D]`` on the device, model's dtype."""


@dataclass
class StepCache:
    """State that the layers of a step share, and the inputs of the current layer.

    Attributes:
        indexer: see :attr:`DecodeStep.indexer`.
        selection: attended by the layers of the current group; None before the first one selects.
        new_tokens: K and V ``[B, Hkv, D]`` that the current layer has to append; None: it has.
        values: results of :meth:`once`, by key.
    """

    indexer: IndexerInputs | None = None
    selection: Selection | None = None
    new_tokens: PagedKV | None = None
    values: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, find: Callable[[], T]) -> T:
        """:meth:`DecodeStep.once` by a key: a name of the engine, which no plug-in's key equals."""
        if key not in self.values:
            self.values[key] = find()
        value: T = self.values[key]
        return value


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """The requests of a decode step, as selection, residency and attention see them.

    All layers share it. Algorithms need the attributes up to ``kv_io``, the properties and the
    methods; the other attributes are the engine's.

    Attributes:
        policy: the rules of every selection.
        representations: name to tensor; :class:`Representation` gives shapes and dtypes.
        slots: ``[B] int64``, request slots.
        tail_lens: ``[B] int32``, tokens in the tail page, the new one included.
        kv_io: reads keys and values.
        seq_lens_cpu: ``[B]``, tokens of each request, known on the host; in a captured step, the
            most that it may have.
        host_slots: ``[B] int64``, host slot of each new token.
        rows: rows of the device tables; row ``b * H + h`` belongs to request b. Its ``tail_pages``
            are those of all layers, ``[L, R] int32``, as the step begins.
        follows: whether an earlier step of the forward may fill tail pages, so that each layer has
            to find them when it begins.
        captured: whether this is a captured step, or one that warms up for the capture.
        index: ``[B] int64``, places of the requests in the batch, or None if they are all of it.
        last: the last tokens of the requests, if some have several tokens in the batch, one after
            the other. Only the last token may fill a page.
        by_mode: the requests of a whole batch by attention mode, in layers that attend sparsely.
        dense_by_mode: the same, in layers that are always dense.
        cache: state that layers share; the only attribute that changes during a step.
    """

    policy: SelectionPolicy
    representations: Mapping[str, Tensor]
    slots: Tensor
    tail_lens: Tensor
    kv_io: KVReader
    seq_lens_cpu: np.ndarray
    host_slots: Tensor
    rows: DecodeRows
    follows: bool = False
    captured: bool = False
    index: Tensor | None = None
    last: DecodeStep | None = None
    by_mode: Mapping[AttentionMode, DecodeStep] = field(default_factory=dict)
    dense_by_mode: Mapping[AttentionMode, DecodeStep] = field(default_factory=dict)
    cache: StepCache = field(default_factory=StepCache, init=False, compare=False, repr=False)

    @property
    def num_pages(self) -> Tensor:
        """``[B] int32``, full pages before the tail page; only these can be selected."""
        return self.rows.num_pages

    @cached_property
    def max_pages(self) -> int:
        """A bound on ``num_pages``, known on the host; if captured, in any step."""
        most = int(max(self.seq_lens_cpu.tolist()) - 1) // self.policy.kv.page_size
        return min(self.rows.table_pages(most), self.host_page_table.shape[1] - 1)

    @property
    def host_page_table(self) -> Tensor:
        """``[B, P] int32``, host page of each page; P is more than ``max_pages``."""
        return self.rows.host_page_table

    @property
    def dense(self) -> Tensor | None:
        """``[B] bool``, requests of a sparse step that attend every page, or None if none does."""
        return self.rows.dense

    @property
    def indexer(self) -> IndexerInputs | None:
        """Of the new tokens in the current layer, for algorithms that declare ``indexer``."""
        return self.cache.indexer

    @cached_property
    def forced_pages(self) -> Tensor:
        """``[B, max_pages] bool``, sinks and recent pages; see :class:`SelectionPolicy`."""
        return self.policy.forced_pages(self.num_pages, self.max_pages)

    def once(self, name: str, find: Callable[[], T]) -> T:
        """The value of ``find()``, which only the first layer of the step calls.

        For values that depend on the requests and not on the layer: on a GPU each operator is a
        launch. ``name`` is unique in the algorithm.
        """
        return self.cache.once(("plug-in", name), find)

    def scaled(self, queries: Tensor) -> Tensor:
        """``queries [B, Hq, D]``, any float dtype, in float32 and times the softmax scale."""
        (query,) = new_tensors("scaled queries", [(queries.shape, torch.float32)], queries.device)
        return query.copy_(queries).mul_(self.policy.scale)

    @property
    def seq_lens(self) -> Tensor:
        """``[B] int32``, tokens of each request, the new one included."""
        return self.num_pages * self.policy.kv.page_size + self.tail_lens

    def tail_keys(self, layer_id: int) -> Tensor:
        """Keys of the tail pages, ``[B, S, Hkv, D]``, model's dtype; valid: first ``tail_lens``."""
        return self.kv_io.read_tails(layer_id, self).k.transpose(1, 2)

    def tail_lse(self, layer_id: int, query: Tensor) -> Tensor:
        """Log-sum-exp of the capped logits of the first ``tail_lens`` tokens in the tail pages.

        Args:
            query: ``[B, Hq, D] float32``, times the softmax scale.

        Returns:
            ``[B, Hq] float32``, natural logarithm; -inf for an empty page.
        """
        rule = AttentionRule(1.0, self.policy.logit_cap)
        return tail_lse(query, self.tail_pages(layer_id), paged_attention, rule)

    def tail_pages(self, layer_id: int, *, with_new: bool = False) -> TailPages:
        """Tail pages for kernels; ``with_new``: see :meth:`BaseSparseAlgorithm.appends`."""
        return self.kv_io.tail_pages(layer_id, self, with_new=with_new)

    def host_keys(self, layer_id: int) -> HostKeys:
        """Keys of the host pool, as they are stored, for :func:`hisparse.kernels.key_score`."""
        return self.kv_io.host_keys(layer_id)

    def every_page(self, width: int) -> Selection:
        """A selection of every full page, ``width`` entries wide."""
        pages = torch.arange(max(width, 1), dtype=torch.int32, device=self.num_pages.device)
        pages = torch.where(pages < self.num_pages[:, None], pages, -1)
        heads = self.policy.heads
        # Contiguous, for all layers that use them.
        return Selection(
            pages[:, None].repeat(1, heads, 1), self.num_pages[:, None].repeat(1, heads)
        )

    def window_pages(self, window: int) -> Selection:
        """A selection of the full pages that the last ``window`` tokens of each request touch.

        The new token counts. The width depends only on the window: steps can be captured.
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
        if self.follows:
            return self.kv_io.find_tails(layer_id, self)
        return self.rows.tail_pages[layer_id]

    def tail_slots(self, layer_id: int) -> Tensor:
        """``[R] int64``, where each row's new token goes: its tail page times S, plus offset."""
        if not self.follows:
            return self.slots_of_layers[layer_id]
        return self.rows.slots_in(self.tails(layer_id), self.policy.kv.page_size)

    @cached_property
    def slots_of_layers(self) -> Tensor:
        """:meth:`tail_slots` of all layers, ``[L, R] int64``, as the step begins."""
        return self.rows.slots_in(self.rows.tail_pages, self.policy.kv.page_size)

    @cached_property
    def filled(self) -> tuple[Tensor, Tensor] | None:
        """The tail pages that the step fills, or None if the host knows that there are none.

        Rows with a full tail page ``[R] bool``, and the host page of each full tail page
        ``[B] int64``, 0 for the other requests.
        """
        size = self.policy.kv.page_size
        if not self.captured and all(length % size for length in self.seq_lens_cpu.tolist()):
            return None
        full = self.rows.tail_lens == size
        if self.captured:
            full &= torch.arange(len(full), device=full.device) < self.rows.num_real_rows
        page = self.host_page_table.gather(1, self.num_pages.long()[:, None])[:, 0]
        of_request = full.view(len(page), -1)[:, 0]
        return full, torch.where(of_request, page, 0).long()

    def use_indexer(self, indexer: IndexerInputs) -> None:
        """Take the inputs of the whole batch in the layer that begins, for the parts too."""
        for part in (self, self.last, self.by_mode.get("sparse")):
            if part is not None:
                part.cache.indexer = indexer if part.index is None else indexer.take(part.index)

    def take(self, places: np.ndarray) -> DecodeStep:
        """The requests at ``places [n] int64`` of the step."""
        index = upload(places, self.slots.device)
        head = torch.arange(self.policy.heads, device=index.device)
        row_index = (index[:, None] * len(head) + head).flatten()
        taken = {x: getattr(self.rows, x)[row_index] for x in ("rows", "capacity", "tail_lens")}
        taken |= {x: getattr(self.rows, x)[index] for x in ("host_page_table", "num_pages")}
        return DecodeStep(
            policy=self.policy,
            representations=self.representations,
            slots=self.slots[index],
            tail_lens=self.tail_lens[index],
            kv_io=self.kv_io,
            seq_lens_cpu=self.seq_lens_cpu[places],
            host_slots=self.host_slots[index],
            rows=DecodeRows(
                **taken,
                tail_pages=self.rows.tail_pages[:, row_index],
                num_real_rows=self.rows.num_real_rows.new_full((1,), row_index.numel()),
                dense=None if self.dense is None else self.dense[index],
                counts=self.rows.counts,
            ),
            follows=self.follows,
            index=index,
        )
