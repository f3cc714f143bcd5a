"""Verification of drafts: runs of tokens are decode steps, and rejected tokens are undone."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hisparse.algorithms import DecodeStep
from hisparse.cache.device_pool import RowSnapshot
from hisparse.engine.batches import DecodeBatch
from hisparse.engine.coordinator import Forward, SparseCoordinator
from hisparse.kernels import serial_operators, upload
from hisparse.types import IndexerInputs, Selection


@dataclass(frozen=True, kw_only=True)
class VerifyBatch:
    """A chain of at most n drafted tokens for each of B requests.

    Token 0 of a chain is the last token that the request has; each other one is a draft of the
    token after the one before it. Token ``j`` of request ``b`` is token ``b * n + j`` of the
    forward. It attends the request's computed tokens, the chain up to it, and itself.

    Attributes:
        slots: ``[B] int64``, request slots.
        slots_cpu: ``[B]``, the same on the host.
        seq_lens_cpu: ``[B]``, computed tokens of each request, before token 0.
        chain_lengths: ``[B]``, tokens of each chain, 1 to n. Tokens after the chain are never
            accepted and are not served; they get the output of token 0.
        host_slots: ``[B, n] int64``, host slots of the n positions after the computed tokens.
        host_page_table: ``[B, P] int32``, host page of each page, those of the drafts included.
    """

    slots: Tensor
    slots_cpu: np.ndarray
    seq_lens_cpu: np.ndarray
    chain_lengths: np.ndarray
    host_slots: Tensor
    host_page_table: Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens of the forward, B * n."""
        return self.host_slots.numel()

    @cached_property
    def lengths(self) -> np.ndarray:
        """``[B, n]``, tokens of each request up to each token of the chain."""
        lengths: np.ndarray = self.seq_lens_cpu[:, None] + np.arange(self.host_slots.shape[1]) + 1
        return lengths

    @cached_property
    def longest(self) -> np.ndarray:
        """``[B]``, tokens of each request if all its drafts are accepted."""
        longest: np.ndarray = self.seq_lens_cpu + self.chain_lengths
        return longest

    def begin(self, engine: SparseCoordinator) -> Forward:
        """See :class:`Batch`."""
        engine.start_forward(self.slots_cpu, self.longest)
        verification = _Verification(self, engine)
        return Forward(verification.attention, accept=verification.accept)


class _Saved(NamedTuple):
    """State of a layer before a run, and the swap-ins of the run.

    Attributes:
        rows: the device tables of all requests.
        entries: each representation ``[host pages, ...]`` of the layer, its entries ``[B, W, ...]``
            of the pages that drafts can fill, and whether tokens write them before a page is full.
        swapped_in: for each attention mode, its requests, and their selection (None: every page).
    """

    rows: RowSnapshot
    entries: list[tuple[Tensor, Tensor, bool]]
    swapped_in: list[tuple[DecodeStep, Selection | None]]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Consecutive tokens of some chains, served as one decode step.

    Attributes:
        requests: ``[T]``, the request of each token, ascending.
        places: ``[T]``, its place in its chain.
        tokens: ``[T] int64``, its number in the forward.
        step: the decode step.
        saved: by layer; empty if all tokens are the first ones of chains, which are never rejected.
    """

    requests: np.ndarray
    places: np.ndarray
    tokens: Tensor
    step: DecodeStep
    saved: dict[int, _Saved] = field(default_factory=dict)


class _Verification:
    """Serves chains of drafts run by run, layer by layer.

    A run is one decode step: its tokens are written, all of them select at once, each with its own
    query, and the LRU order takes the selections one after the other. The tail page, the LRU order
    and the representations are those that decoding the tokens one by one would leave. A run ends
    where a token fills a page.

    After the verification, a request goes back to the state after its last accepted token: to that
    before the run of its first rejected token, changed by the swap-ins of the accepted tokens of
    this run. None of these fills a page. Until then the host slots of the chain's positions hold
    the whole chain.

    Args:
        batch: the drafts.
    """

    def __init__(self, batch: VerifyBatch, engine: SparseCoordinator) -> None:
        self._batch = batch
        self._engine = engine
        self._manager = engine.manager
        self._device = engine.manager.device.device
        held = engine.manager.residency.held(batch.slots_cpu)
        self._width = int(held.max())
        self._rows = self._rows_of(batch.slots)
        self._fillable = self._fillable_pages()
        self._numbers = self._number_runs(held)
        self._runs = [self._run(number) for number in range(self._numbers.max() + 1)]
        self._output = self._output_index()

    def _number_runs(self, held: np.ndarray) -> np.ndarray:
        """``[B, n + 1]``, the number of the run that serves each token; -1: it is not served.

        Args:
            held: ``[B]``, device pages of each of a request's rows.
        """
        batch, (num_requests, count) = self._batch, self._batch.host_slots.shape
        ends, longest = self._engine.modes.runs(batch.lengths, held)
        numbers = np.full((num_requests, count + 1), -1)
        for request, length in enumerate(batch.chain_lengths.tolist()):
            number = first = 0
            for token in range(length):
                numbers[request, token] = number
                if ends[request, token] or token + 1 - first == longest[request]:
                    number, first = number + 1, token + 1
        return numbers

    def _run(self, number: int) -> _Run:
        """Prepare a run."""
        batch = self._batch
        requests, places = np.nonzero(self._numbers == number)
        is_last = self._numbers[requests, places + 1] != number
        seq_lens = batch.lengths[requests, places]
        index = self._upload(requests)
        step = DecodeBatch(
            slots=batch.slots[index],
            slots_cpu=batch.slots_cpu[requests],
            seq_lens=self._upload(seq_lens),
            seq_lens_cpu=seq_lens,
            host_slots=batch.host_slots[index, self._upload(places)],
            host_page_table=batch.host_page_table[index],
            last=None if is_last.all() else is_last,
            follows=number > 0,
        ).step(self._engine)
        tokens = self._upload(requests * batch.host_slots.shape[1] + places)
        return _Run(requests=requests, places=places, tokens=tokens, step=step)

    def attention(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        indexer: IndexerInputs | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """``q [B * n, Hq, D]``, ``k, v [B * n, Hkv, D]`` -> ``[B * n, Hq, Dv]``, q's dtype."""
        outputs: list[Tensor] = []
        for run in self._runs:
            tokens = run.tokens
            with serial_operators(q.device):
                if run.places.any():
                    run.saved[layer_id] = self._save(layer_id)
                drafts = (q[tokens], k[tokens], v[tokens], indexer and indexer.take(tokens), sinks)
            outputs.append(self._engine.decode.run(run.step, layer_id, *drafts))
            if layer_id in run.saved:
                for mode, part in self._engine.modes.of_layer(layer_id, run.step).items():
                    if mode != "streamed":
                        decode = self._engine.decode
                        selection = decode.selection_of(mode, layer_id, part)
                        run.saved[layer_id].swapped_in.append((part, selection))
        with serial_operators(q.device):
            return torch.cat(outputs)[self._output]

    def accept(self, last: np.ndarray) -> None:
        """Go back to the state after the last accepted token of each request.

        Args:
            last: ``[B]``, the token's place in the chain.
        """
        requests = np.flatnonzero(last + 1 < self._batch.chain_lengths)
        numbers = self._numbers[requests, last[requests] + 1]
        for number in np.unique(numbers):
            self._undo(self._runs[number], requests[numbers == number], last)

    def _undo(self, run: _Run, requests: np.ndarray, last: np.ndarray) -> None:
        """Undo the tokens of some requests after ``last [B]``, of which the first is in ``run``."""
        batch, size = self._batch, self._manager.host.kv.page_size
        again = np.isin(run.requests, requests) & (run.places <= last[run.requests])
        replayed = self._upload(again).bool() if again.any() else None
        # Until a page is filled, later tokens are only written after the accepted ones.
        ends = batch.lengths[requests, last[requests]]
        moved = batch.longest[requests] // size > batch.seq_lens_cpu[requests] // size
        tail_index = self._upload(np.where(moved & (ends % size > 0), ends // size, -1)).int()
        index = self._upload(requests)
        rows, table = self._rows_of(index), batch.host_page_table[index]
        pages, device = self._fillable[index], self._manager.device
        # What tokens write before a page is full stays in the page of the last accepted token.
        column = ends // size - batch.seq_lens_cpu[requests] // size
        begun = (np.arange(pages.shape[1]) == column[:, None]) & (ends % size > 0)[:, None]
        after = pages.masked_fill(self._upload(begun).bool(), 0)
        for layer_id, saved in run.saved.items():
            with serial_operators(self._device):
                tables = saved.rows.take(rows)
                before = device.save_rows(layer_id, tables.rows, self._width)
                device.restore_rows(layer_id, tables)
                if replayed is not None:
                    for swapped_in in saved.swapped_in:
                        self._replay(layer_id, *swapped_in, replayed)
                self._manager.kv_io.read_changed(layer_id, before, table, tail_index)
                for tensor, entries, by_token in saved.entries:
                    tensor[after if by_token else pages] = entries[index]

    def _replay(
        self,
        layer_id: int,
        part: DecodeStep,
        selection: Selection | None,
        replayed: Tensor,
    ) -> None:
        """Change the tables as the tokens ``replayed [T] bool`` did; the others select nothing."""
        if part.index is not None:
            replayed = replayed[part.index]
        pages, lengths = selection or part.every_page(part.max_pages)
        pages, lengths = pages.where(replayed[:, None, None], -1), lengths * replayed[:, None]
        uncounted = replace(part, rows=part.rows._replace(counts=None))
        chosen = Selection(pages, lengths)
        self._manager.loader.diff(layer_id, uncounted, chosen)

    def _upload(self, values: np.ndarray) -> Tensor:
        """``values`` as int64 on the device, in the same shape."""
        return upload(values, self._device, torch.int64)

    def _rows_of(self, requests: Tensor) -> Tensor:
        """``[B * H]``, the rows of requests or request slots ``[B] int64``."""
        heads = torch.arange(self._manager.device.heads, device=self._device)
        return (requests[:, None] * len(heads) + heads).flatten()

    def _fillable_pages(self) -> Tensor:
        """``[B, W] int64``, host pages that drafts can fill, padded with 0."""
        batch, size = self._batch, self._manager.host.kv.page_size
        first, end = batch.seq_lens_cpu // size, batch.longest // size
        pages = first[:, None] + np.arange((end - first).max())
        real = self._upload(pages < end[:, None]).bool()
        index = self._upload(pages.clip(max=batch.host_page_table.shape[1] - 1))
        return batch.host_page_table.gather(1, index).where(real, 0).long()

    def _output_index(self) -> Tensor:
        """``[B * n]``, for each token, the index of its output among those of all runs."""
        num_requests, count = self._batch.host_slots.shape
        index = np.full((num_requests, count), -1)
        served = 0
        for run in self._runs:
            index[run.requests, run.places] = served + np.arange(len(run.places))
            served += len(run.places)
        return self._upload(np.where(index < 0, index[:, :1], index).flatten())

    def _save(self, layer_id: int) -> _Saved:
        """The state of a layer before a run."""
        rows = self._manager.device.save_rows(layer_id, self._rows, self._width)
        kept = self._engine.representations.pages_of(layer_id)
        return _Saved(rows, [(x, x[self._fillable], by_token) for x, by_token in kept], [])
