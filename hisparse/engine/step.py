"""The tensors of a forward: inputs from the framework, and data that all layers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hisparse.algorithms import DecodeStep, SelectionPolicy
from hisparse.cache import DevicePool, SparseKVCacheManager, StepRows
from hisparse.engine.modes import ModeMasks
from hisparse.engine.representations import Representations
from hisparse.kernels import TailPages, paged_attention
from hisparse.types import UNSCALED, AttentionRule, IndexerInputs, Selection

__all__ = [
    "AttentionMode",
    "DecodeBatch",
    "DecodeForward",
    "DecodePart",
    "FilledTails",
    "MixedBatch",
    "PrefillBatch",
    "PrefillChunk",
    "StepPages",
    "divide",
]

#: How a layer attends a request: "sparse", over the selected pages; "resident", densely, over a
#: context that fits the row's device pages; "staged", densely, in tiles from host memory; "window",
#: over the last tokens, in a layer that attends no others.
AttentionMode = Literal["sparse", "resident", "staged", "window"]


@dataclass(frozen=True, kw_only=True)
class PrefillChunk:
    """The part of one request's prompt that this forward computes.

    Attributes:
        slot: request slot.
        start: position of the first token; the tokens before it are in host memory.
        length: number of tokens.
        offset: index of the first token in the forward's flat token dimension.
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
        """``host_pages`` copied to the host once, for the copy engine."""
        return self.host_pages.cpu()


@dataclass(frozen=True, kw_only=True)
class PrefillBatch:
    """Chunks of several requests, their tokens concatenated.

    Attributes:
        chunks: one per request.
        host_slots: ``[T] int64``, host slot of each token.
    """

    chunks: Sequence[PrefillChunk]
    host_slots: Tensor

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.host_slots.shape[0]

    @cached_property
    def contexts(self) -> tuple[np.ndarray, np.ndarray]:
        """Request slots, and the tokens that each has after its chunk, ``[B]`` each."""
        slots, ends = np.array([(chunk.slot, chunk.end) for chunk in self.chunks]).T
        return slots, ends


@dataclass(frozen=True, kw_only=True)
class DecodeBatch:
    """One new token for each of B requests.

    A request with several new tokens stands here once for each of them, one after the other. It
    attends from each of them the tokens up to it. Only the last of them may fill a page.

    Attributes:
        slots: ``[B] int64``, request slots.
        slots_cpu: ``[B]``, the same on the host.
        seq_lens: ``[B] int64``, tokens including the new one.
        seq_lens_cpu: ``[B]``, the same on the host.
        host_slots: ``[B] int64``, host slot of the new token.
        host_page_table: ``[B, P] int32``, host page of each page of the sequences.
        num_real: ``[1] int32``, number of requests before the padding, in captured steps. Only
            device tensors then describe the requests; ``seq_lens_cpu`` holds the most tokens that
            each request may have. None: there is no padding.
        last: ``[B] bool``, the last tokens of requests with several; None: no request has several.
    """

    slots: Tensor
    slots_cpu: np.ndarray
    seq_lens: Tensor
    seq_lens_cpu: np.ndarray
    host_slots: Tensor
    host_page_table: Tensor
    num_real: Tensor | None = None
    last: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """B."""
        return self.host_slots.shape[0]


@dataclass(frozen=True, kw_only=True)
class MixedBatch:
    """Chunks of prompts and a decode step of other requests, in one forward.

    Attributes:
        prefill: the chunks; their tokens are the first of the forward.
        decode: the decode step, without padding.
    """

    prefill: PrefillBatch
    decode: DecodeBatch

    @property
    def num_tokens(self) -> int:
        """Tokens of both parts."""
        return self.prefill.num_tokens + self.decode.num_tokens


@dataclass(frozen=True)
class StepPages:
    """Reads keys for the requests of a step; see :class:`hisparse.algorithms.step.PageReader`.

    Attributes:
        manager: the cache.
        rows: rows of the requests.
    """

    manager: SparseKVCacheManager
    rows: StepRows

    def tail_keys(self, layer_id: int) -> Tensor:
        return self.manager.kv_io.read_tails(layer_id, self.rows).k.transpose(1, 2)

    def tail_lse(self, layer_id: int, query: Tensor, logit_cap: float) -> Tensor:
        kv, tails, lens = self.tail_pages(layer_id)
        # Attention over a table of one page. Its output is not wanted, but costs little.
        queries = query.view(self.rows.rows.shape[0], -1, query.shape[-1])
        rule = AttentionRule(1.0, logit_cap) if logit_cap else UNSCALED
        _, lse = paged_attention(queries, kv, tails[:, None], lens, rule=rule)
        return lse.view(query.shape[:2])

    def tail_pages(self, layer_id: int) -> TailPages:
        device, pages = self.manager.device, self.rows.tail_pages[layer_id]
        readable = device.format.readable_pages(device.stored(layer_id), pages)
        return TailPages(*readable, self.rows.tail_lens)

    def host_keys(self, layer_id: int) -> Tensor:
        return self.manager.kv_io.host_pages(layer_id).k

    def read_keys(self, layer_id: int, host_slots: Tensor) -> Tensor:
        return self.manager.kv_io.read_tokens(layer_id, host_slots).k


@dataclass(kw_only=True)
class DecodePart:
    """Requests of a step that are attended in one mode, in all layers.

    Attributes:
        mode: the attention mode.
        view: the algorithm's view of the requests.
        pages: reads the requests' keys.
        seq_lens_cpu: ``[B]``, tokens of each request; in a captured step, the most it may have.
        index: ``[B] int64``, indices of the requests in the batch; None: the whole batch.
        dense: ``[B] bool``, dense requests of a sparse part; None: no request is dense.
        captured: whether this is a captured step, or one that warms up for the capture.
        selection: the selection that the current group of layers shares; in the mode "window", the
            pages that the window touches, which all layers with this window share.
    """

    mode: AttentionMode
    view: DecodeStep
    pages: StepPages
    seq_lens_cpu: np.ndarray
    index: Tensor | None = None
    dense: Tensor | None = None
    captured: bool = False
    selection: Selection | None = None

    @property
    def rows(self) -> StepRows:
        """The requests' rows of the device tables."""
        return self.pages.rows

    def take(self, mask: np.ndarray, mode: AttentionMode) -> DecodePart:
        """The requests in ``mask [B] bool``, attended in ``mode``."""
        if mask.all():
            return replace(self, mode=mode)
        index = torch.from_numpy(np.flatnonzero(mask)).to(self.rows.rows.device)
        rows, seq_lens, view = self.rows.take(index), self.seq_lens_cpu[mask], self.view
        pages = StepPages(self.pages.manager, rows)
        return DecodePart(
            mode=mode,
            view=replace(
                view,
                slots=view.slots[index],
                num_pages=rows.num_pages,
                tail_lens=view.tail_lens[index],
                max_pages=_most_pages(seq_lens, view.policy.kv.page_size),
                host_page_table=rows.host_page_table,
                pages=pages,
            ),
            pages=pages,
            seq_lens_cpu=seq_lens,
            index=index,
        )

    def set_indexer(self, indexer: IndexerInputs) -> None:
        """Add the indexer inputs of the whole batch to the view, for one layer."""
        inputs = indexer if self.index is None else indexer.take(self.index)
        self.view = self.view.with_indexer(inputs)


@dataclass(frozen=True, kw_only=True)
class FilledTails:
    """The tail pages that a step fills.

    Attributes:
        rows: ``[R] bool``, rows of the last tokens with a full tail page after this step.
        host_pages: ``[b] int64``, host page of each full tail page, 0 for the other requests.
    """

    rows: Tensor
    host_pages: Tensor


@dataclass(frozen=True, kw_only=True)
class DecodeForward:
    """The data of a decode step that all layers share.

    Attributes:
        whole: the whole batch.
        host_slots: ``[B] int64``, host slot of each new token.
        tail_slots: ``[L, R] int64``, device page of each row's tail times S, plus the offset of
            the new token in the page.
        last: the last token of each request; the whole batch, unless a request has several tokens.
        filled: the tail pages that these tokens fill; None: the host knows that there are none.
        parts: requests by mode, in sparse layers.
        dense_parts: requests by mode, in layers that are always dense.
        window_parts: all requests, for the layers with a window, by its length in tokens.
    """

    whole: DecodePart
    host_slots: Tensor
    tail_slots: Tensor
    last: DecodePart
    filled: FilledTails | None
    parts: tuple[DecodePart, ...] = ()
    dense_parts: tuple[DecodePart, ...] = ()
    window_parts: Mapping[int, tuple[DecodePart, ...]] = field(default_factory=dict)

    def read_tails(self, layer_id: int, device: DevicePool) -> None:
        """Read a layer's tail pages again: an earlier step of this forward may change them."""
        tails, size = device.tail_pages[layer_id], device.kv.page_size
        parts = (self.whole, self.last, *self.parts, *self.dense_parts)
        for rows in {id(part.rows): part.rows for part in parts}.values():
            rows.tail_pages[layer_id] = tails[rows.rows]
        rows = self.whole.rows
        self.tail_slots[layer_id] = rows.tail_pages[layer_id].long() * size + (rows.tail_lens - 1)

    @classmethod
    def of(
        cls,
        batch: DecodeBatch,
        policy: SelectionPolicy,
        manager: SparseKVCacheManager,
        representations: Representations,
    ) -> DecodeForward:
        """The step of a batch, not yet divided by mode."""
        heads, size = policy.heads, policy.kv.page_size
        head = torch.arange(heads, device=batch.slots.device)
        state_rows = (batch.slots[:, None] * heads + head).flatten()
        position = batch.seq_lens - 1
        tail_lens = (position % size + 1).to(torch.int32)
        if batch.num_real is None:
            num_real_rows = state_rows.new_full((1,), state_rows.numel(), dtype=torch.int32)
        else:
            num_real_rows = batch.num_real * heads
        rows = StepRows(
            heads=heads,
            rows=state_rows,
            num_pages=(position // size).to(torch.int32),
            host_page_table=batch.host_page_table,
            capacity=manager.device.capacity[state_rows],
            num_real_rows=num_real_rows,
            tail_pages=manager.device.tail_pages[:, state_rows],
            tail_lens=tail_lens.repeat_interleave(heads),
        )
        pages = StepPages(manager, rows)
        view = DecodeStep(
            policy=policy,
            representations=representations.tensors,
            slots=batch.slots,
            num_pages=rows.num_pages,
            tail_lens=tail_lens,
            max_pages=_most_pages(batch.seq_lens_cpu, size),
            host_page_table=batch.host_page_table,
            pages=pages,
            indexes=representations.indexes,
        )
        whole = DecodePart(mode="sparse", view=view, pages=pages, seq_lens_cpu=batch.seq_lens_cpu)
        last = whole if batch.last is None else whole.take(batch.last, "sparse")
        return cls(
            whole=whole,
            host_slots=batch.host_slots,
            tail_slots=rows.tail_pages.long() * size + (rows.tail_lens - 1),
            last=last,
            filled=_find_filled(last, batch.num_real, size),
            window_parts={
                window: (
                    replace(whole, mode="window", selection=rows.window_pages(window, policy.kv)),
                )
                for window in set(policy.kv.windows) - {0}
            },
        )


def divide(whole: DecodePart, masks: ModeMasks) -> tuple[DecodePart, ...]:
    """Divide the requests of a step by mode; modes without a request are left out."""
    modes: tuple[AttentionMode, ...] = ("sparse", "resident", "staged")
    return tuple(
        whole.take(mask, mode) for mask, mode in zip(masks, modes, strict=True) if mask.any()
    )


def _most_pages(seq_lens: np.ndarray, page_size: int) -> int:
    """Full pages before the tail page of the longest request in ``seq_lens [B]``."""
    return int(seq_lens.max() - 1) // page_size


def _find_filled(part: DecodePart, num_real: Tensor | None, page_size: int) -> FilledTails | None:
    rows = part.rows
    full = part.view.tail_lens == page_size
    if num_real is not None:
        full &= torch.arange(full.shape[0], device=full.device) < num_real
    elif not (part.seq_lens_cpu % page_size == 0).any():
        return None
    page = rows.host_page_table.gather(1, rows.num_pages.long()[:, None])[:, 0]
    return FilledTails(
        rows=full.repeat_interleave(rows.heads), host_pages=torch.where(full, page, 0).long()
    )
