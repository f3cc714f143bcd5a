"""Verification of drafts: runs of tokens are decode steps, and rejected tokens are undone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hisparse.algorithms import DecodeStep
from hisparse.cache import SparseKVCacheManager
from hisparse.cache.device_pool import RowSnapshot
from hisparse.cache.swap_in import Wanted
from hisparse.engine.batches import DecodeBatch
from hisparse.engine.coordinator import Forward, SparseCoordinator
from hisparse.engine.modes import Runs
from hisparse.kernels import promote_tail, serial_operators, upload
from hisparse.types import IndexerInputs


@dataclass(frozen=True, kw_only=True)
class VerifyStep:
    """A run of tokens of each of some chains, served as a decode step.

    Attributes:
        runs: by request, its index in the batch, the tokens of its run.
    """

    runs: dict[int, range]

    @property
    def last(self) -> np.ndarray | None:
        """``[T] bool``, the last token of each run; None: each run has one."""
        ends = [token == run[-1] for run in self.runs.values() for token in run]
        return None if all(ends) else np.array(ends)

    @cached_property
    def pairs(self) -> np.ndarray:
        """``[T, 2]``, request and place in its chain of each token, run by run."""
        return np.array([(b, token) for b, run in self.runs.items() for token in run])

    def first(self, request: int) -> int:
        """Index of the first token of a request's run among the tokens."""
        return sum(len(run) for b, run in self.runs.items() if b < request)


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
        chain_lengths: ``[B]``, tokens of each chain, 1 to n. What comes after them is never
            accepted, and is not served; it gets the output of token 0.
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

    def steps(self, runs: Runs) -> Iterator[VerifyStep]:
        """The runs of all chains, in the order in which they are served."""
        of_chains = [
            _divide(int(length), ends, int(most))
            for length, ends, most in zip(self.chain_lengths, *runs, strict=True)
        ]
        for number in range(max(map(len, of_chains))):
            yield VerifyStep(
                runs={b: runs[number] for b, runs in enumerate(of_chains) if number < len(runs)}
            )

    def decode_batch(self, step: VerifyStep) -> DecodeBatch:
        """A step as a decode step of its tokens."""
        device = self.host_slots.device
        of_tokens, places = step.pairs.T
        seq_lens = self.lengths[of_tokens, places]
        requests = upload(of_tokens, device)
        return DecodeBatch(
            slots=self.slots[requests],
            slots_cpu=self.slots_cpu[of_tokens],
            seq_lens=upload(seq_lens, device),
            seq_lens_cpu=seq_lens,
            host_slots=self.host_slots[requests, upload(places, device)],
            host_page_table=self.host_page_table[requests],
            last=step.last,
        )

    def begin(self, engine: SparseCoordinator) -> Forward:
        """See :class:`Batch`."""
        engine.start_forward(self.slots_cpu, self.longest)
        held = engine.manager.residency.held(self.slots_cpu)
        runs = list(self.steps(engine.modes.runs(self.lengths, held)))
        verification = _Verification(self, runs, engine)
        return Forward(verification.attention, accept=verification.accept)


def _divide(length: int, ends: np.ndarray, most: int) -> list[range]:
    """The runs of a chain of ``length`` tokens; see :class:`Runs`."""
    runs, first = [], 0
    for token in range(length):
        if ends[token] or token + 1 == length or token + 1 - first == most:
            runs.append(range(first, token + 1))
            first = token + 1
    return runs


@dataclass(kw_only=True)
class _Saved:
    """What a step found in one layer, and what it did.

    Attributes:
        rows: the device tables before the step.
        entries: ``[b, W, ...]`` of each representation of pages that drafts can fill, before it.
        filled: the same after it; None: the step fills no page.
        log: what it swapped in.
    """

    rows: RowSnapshot
    entries: list[Tensor]
    filled: list[Tensor] | None
    log: list[Wanted]


class _Verification:
    """Serves chains of drafts run by run, layer by layer.

    A run is one decode step: its tokens are written, all of them select at once, each with its own
    query, and the LRU order takes the selections one after the other. The tail page, the LRU order
    and the representations are those that decoding the tokens one by one would leave. A run ends
    where a token fills a page.

    After the verification, a request goes back to the state after its last accepted token. Until
    then the host slots of the chain's positions hold the whole chain.

    Args:
        batch: the drafts.
        runs: the runs, in the order in which they are served.
        engine: serves them.
    """

    def __init__(
        self,
        batch: VerifyBatch,
        runs: Sequence[VerifyStep],
        engine: SparseCoordinator,
    ) -> None:
        self._batch = batch
        self._runs = runs
        self._steps = [batch.decode_batch(run).step(engine) for run in runs]
        self._manager = manager = engine.manager
        self._representations = engine.representations
        self._decode = engine.decode
        self._device = manager.device.device
        self._width = int(manager.residency.held(batch.slots_cpu).max())
        self._saved: dict[tuple[int, int], _Saved] = {}
        count = batch.host_slots.shape[1]
        tokens = [run.pairs @ [count, 1] for run in runs]
        self._tokens = [self._upload(each) for each in tokens]
        self._rows = [(step.last or step).rows.rows for step in self._steps]
        self._filling = [self._filled_pages(list(run.runs)) for run in runs]
        self._returnable = [self._can_return(run) for run in runs]
        self._output = self._output_index(np.concatenate(tokens))

    def attention(
        self,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        indexer: IndexerInputs | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """``q [B * n, Hq, D]``, ``k, v [B * n, Hkv, D]`` -> ``[B * n, Hq, Dv]``."""
        outputs: list[Tensor] = []
        for number, step in enumerate(self._steps):
            tokens = self._tokens[number]
            with serial_operators(q.device):
                if number:
                    self._read_tails(layer_id, step)
                saved = self._save(layer_id, number)
                drafts = (q[tokens], k[tokens], v[tokens], indexer and indexer.take(tokens), sinks)
            with self._manager.loader.logged() as log:
                outputs.append(self._decode.run(step, layer_id, *drafts))
            if saved is not None:
                saved.log = log
                if (step.last or step).filled is not None:
                    saved.filled = self._entries(layer_id, number)
        with serial_operators(q.device):
            out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
            return out if self._output is None else out[self._output]

    def accept(self, last: np.ndarray) -> None:
        """Go back to the state after the last accepted token of each request.

        Args:
            last: ``[B]``, the token's place in the chain.
        """
        ends, size = self._batch.chain_lengths - 1, self._manager.host.kv.page_size
        groups = dict[tuple[int, bool], dict[int, int]]()
        for request in np.flatnonzero(last < ends).tolist():
            token = int(last[request])
            number = next(i for i, x in enumerate(self._runs) if token in x.runs.get(request, ()))
            fills = bool(self._batch.lengths[request, token] % size == 0)
            groups.setdefault((number, fills), {})[request] = token
        for (number, fills), tokens in groups.items():
            undo = _Undo(self._batch, self._runs[number], self._steps[number], tokens, fills)
            for layer_id in range(self._representations.num_layers):
                with serial_operators(self._device):
                    self._go_back(layer_id, number, undo)

    def _upload(self, values: np.ndarray) -> Tensor:
        return upload(values, self._device, torch.int64)

    def _can_return(self, served: VerifyStep) -> bool:
        """Whether a token is served that is not the last of its chain."""
        ends = self._batch.chain_lengths - 1
        return any(run.start < ends[b] for b, run in served.runs.items())

    def _read_tails(self, layer_id: int, step: DecodeStep) -> None:
        """Read a layer's tail pages again: an earlier step of this forward may change them."""
        device = self._manager.device
        steps = [step, step.last, *step.by_mode.values(), *step.dense_by_mode.values()]
        # Steps that are not divided share their tensors.
        for rows in {id(x.rows): x.rows for x in steps if x is not None}.values():
            rows.tail_pages[layer_id] = device.tail_pages[layer_id, rows.rows]
        tails = step.rows.tail_pages[layer_id].long() * device.kv.page_size
        step.tail_slots[layer_id] = tails + (step.rows.tail_lens - 1)

    def _filled_pages(self, requests: list[int]) -> Tensor | None:
        """``[b, W] int64``, host pages that drafts can fill, padded with 0; None: none."""
        batch, size = self._batch, self._manager.host.kv.page_size
        first, end = (x[requests] // size for x in (batch.seq_lens_cpu, batch.longest))
        most = int((batch.longest // size - batch.seq_lens_cpu // size).max())
        if not most:
            return None
        pages = first[:, None] + np.arange(most)
        real = self._upload(pages < end[:, None]).bool()
        table = batch.host_page_table[self._upload(np.array(requests))]
        found = table.gather(1, self._upload(pages).clamp(max=table.shape[1] - 1))
        return found.where(real, 0).long()

    def _output_index(self, tokens: np.ndarray) -> Tensor | None:
        """``[B * n]``, which served token each token's output is; None: all, in their order."""
        num_requests, count = self._batch.host_slots.shape
        first = np.arange(num_requests)[:, None] * count
        served = np.arange(count) < self._batch.chain_lengths[:, None]
        place = np.zeros(num_requests * count, dtype=np.int64)
        place[tokens] = np.arange(len(tokens))
        index = place[np.where(served, first + np.arange(count), first).flatten()]
        if len(tokens) == len(index) and (index == np.arange(len(index))).all():
            return None
        return self._upload(index)

    def _save(self, layer_id: int, number: int) -> _Saved | None:
        """Keep the state before a step, unless no request can return to one of its tokens."""
        if not self._returnable[number]:
            return None
        rows = self._manager.device.save_rows(layer_id, self._rows[number], self._width)
        entries = self._entries(layer_id, number)
        saved = _Saved(rows=rows, entries=entries, filled=None, log=[])
        self._saved[layer_id, number] = saved
        return saved

    def _entries(self, layer_id: int, number: int) -> list[Tensor]:
        """Representations of the pages that drafts can fill."""
        pages = self._filling[number]
        if pages is None:
            return []
        return [tensor[layer_id, pages] for tensor in self._tensors(layer_id)]

    def _tensors(self, layer_id: int) -> list[Tensor]:
        """Representations of pages, if the layer has any."""
        has_entries = self._manager.host.kv.has_entries(layer_id)
        return self._representations.per_page if has_entries else []

    def _go_back(self, layer_id: int, number: int, undo: _Undo) -> None:
        """Return to the state after earlier tokens of a run, in one layer."""
        saved, pages = self._saved[layer_id, number], self._filling[number]
        undo.restore_rows(layer_id, saved, self._manager)
        if pages is not None:
            kept = saved.filled if undo.fills else saved.entries
            assert kept is not None, "the step filled a page"
            for tensor, entries in zip(self._tensors(layer_id), kept, strict=True):
                tensor[layer_id, pages[undo.index]] = entries[undo.index]


class _Undo:
    """Requests that go back to the state after tokens of one run.

    The tables are those before the run, changed by the swap-ins up to the tokens, and by the page
    that the tokens fill.

    Args:
        batch: the drafts.
        run: the run.
        step: the decode step that served it.
        tokens: by request, the place in its chain of the token after which it goes on.
        fills: whether these tokens fill their page: all do, or none.

    Attributes:
        fills: as given.
        index: ``[m] int64``, the requests among those of the run.
    """

    def __init__(
        self,
        batch: VerifyBatch,
        run: VerifyStep,
        step: DecodeStep,
        tokens: Mapping[int, int],
        fills: bool,
    ) -> None:
        self.fills = fills
        size, requests = step.policy.kv.page_size, list(tokens)
        ends = batch.lengths[requests, list(tokens.values())]
        places = np.searchsorted(list(run.runs), requests)
        #: The requests that go back: rows, capacities, host pages.
        self._step = (step.last or step).take(places)
        self.index = self._upload(places, torch.int64)
        heads = torch.arange(step.policy.heads, device=step.slots.device)
        self._rows = (self.index[:, None] * len(heads) + heads).flatten()
        # Until a page is filled, later tokens are only written after the accepted ones.
        tails = batch.seq_lens_cpu[requests] // size
        moved = (batch.longest[requests] // size > tails) & (ends % size > 0)
        self._tail_index = self._upload(np.where(moved, ends // size, -1), torch.int32)
        self._filled = self._upload(ends // size - 1, torch.int32)
        # The run up to the tokens, in each part of the step that swaps in on its own.
        wanted = np.zeros(len(run.pairs), dtype=bool)
        for request, token in tokens.items():
            first = run.first(request)
            wanted[first : first + token - run.runs[request].start + 1] = True
        self._replays: dict[int, DecodeStep] = {}
        for part in (step, *step.by_mode.values(), *step.dense_by_mode.values()):
            of_part = wanted if part.places is None else wanted[part.places]
            if of_part.any():
                self._replays[id(part.rows)] = part.take(np.flatnonzero(of_part))

    def _upload(self, values: np.ndarray, dtype: torch.dtype) -> Tensor:
        return upload(values, self._step.slots.device, dtype)

    def restore_rows(self, layer_id: int, saved: _Saved, manager: SparseKVCacheManager) -> None:
        """Give the rows in one layer the tables and the pages that they had after the tokens."""
        device, tables = manager.device, saved.rows.take(self._rows)
        before = device.save_rows(layer_id, tables.rows, tables.slot_pages.shape[1])
        device.restore_rows(layer_id, tables)
        for wanted in saved.log:
            if id(wanted.step.rows) in self._replays:
                manager.loader.replay(layer_id, wanted.of(self._replays[id(wanted.step.rows)]))
        if self.fills:
            promote_tail(
                tables.rows,
                self._filled,
                torch.ones_like(tables.rows, dtype=torch.bool),
                self._step.rows.capacity,
                device.state(layer_id),
                device.tail_pages[layer_id],
            )
        table = self._step.host_page_table
        manager.kv_io.read_changed(layer_id, before, table, self._tail_index)
