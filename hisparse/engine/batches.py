"""What front ends hand to a forward; each batch knows how to run itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hisparse.algorithms import DecodeStep
from hisparse.engine.coordinator import AttendLayer, Forward, SparseCoordinator
from hisparse.engine.modes import ModeMasks, divide
from hisparse.engine.prefill import PrefillChunk
from hisparse.errors import HiSparseError
from hisparse.kernels import DecodeRows
from hisparse.types import IndexerInputs


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

    def begin(self, engine: SparseCoordinator) -> Forward:
        """See :class:`Batch`."""
        engine.start_forward(*self.contexts)
        return self.prepare(engine)

    def prepare(self, engine: SparseCoordinator) -> Forward:
        """Begin a forward for which capacities are fitted."""
        manager, residency = engine.manager, engine.manager.residency
        slots, _ = self.contexts
        residency.drop_replaced(slots, [c.host_pages for c in self.chunks])
        for chunk in self.chunks:
            residency.keep_pages(chunk.slot, chunk.host_pages)
            if engine.shareable is not None:
                engine.shareable.prefill(chunk.start, chunk.host_pages)
        reused = np.array([c.start * residency.is_cold(c.slot) for c in self.chunks])
        engine.choices.add("reused", slots[reused > 0], reused[reused > 0])
        written = self.num_tokens * manager.host.format.token_bytes
        manager.counters.add("written_bytes", written)
        run: AttendLayer = partial(engine.prefill.run, self.chunks, self.host_slots)
        if engine.restored is not None and engine.restored.begin(self.chunks):
            run = _after(engine.restored.prepare, run)
        return Forward(run, lambda: residency.mark_warm(c.slot for c in self.chunks))


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
        last: ``[B] bool``, the last token of each request, or None if each has one token.
        follows: whether an earlier step of the forward may have filled tail pages.
    """

    slots: Tensor
    slots_cpu: np.ndarray
    seq_lens: Tensor
    seq_lens_cpu: np.ndarray
    host_slots: Tensor
    host_page_table: Tensor
    num_real: Tensor | None = None
    last: np.ndarray | None = None
    follows: bool = False

    @property
    def num_tokens(self) -> int:
        """B."""
        return self.host_slots.shape[0]

    def begin(self, engine: SparseCoordinator) -> Forward:
        """See :class:`Batch`.

        A batch with static tensors (``num_real``) is only prepared, by tensor operations that can
        be captured together with the layers. Padding writes only to its own page.

        Raises:
            HiSparseError: the batch is static, and steps are :attr:`not_capturable`.
        """
        if self.num_real is not None:
            return Forward(partial(engine.decode.run, self._captured_step(engine)))
        engine.start_forward(self.slots_cpu, self.seq_lens_cpu)
        return self.prepare(engine)

    def prepare(self, engine: SparseCoordinator) -> Forward:
        """Begin a forward for which capacities are fitted."""
        run: AttendLayer = partial(engine.decode.run, self.step(engine))
        new = engine.transferred
        if new is not None and new.begin(self.slots_cpu, self.seq_lens_cpu, self.host_page_table):
            run = _after(new.prepare, run)
        return Forward(run)

    def begin_replay(self, engine: SparseCoordinator) -> bool:
        """Run the host's part of a captured decode step: resets, capacities, counts.

        The batch has the real requests, without padding.

        Returns:
            False if the graph cannot serve these requests; begin an eager step instead. Reasons: a
            dense context exceeds its row's device pages (their number depends on concurrent
            requests), a request was just transferred, or one uses slot 0, the slot of the padding.
        """
        if engine.not_capturable is not None or not self.slots_cpu.all():
            return False
        if engine.transferred is not None and engine.transferred.any_of(self.slots_cpu.tolist()):
            return False
        engine.start_forward(self.slots_cpu, self.seq_lens_cpu)
        masks, dense = self._masks(engine)
        if masks.streamed.any() or (dense is not None and dense.streamed.any()):
            return False
        self._count(engine, masks, dense)
        engine.replayed = True
        return True

    def step(self, engine: SparseCoordinator) -> DecodeStep:
        """The requests as all layers share them, divided by attention mode."""
        masks, dense = self._masks(engine)
        self._count(engine, masks, dense)
        step = self._undivided(engine)
        return replace(
            step,
            by_mode=divide(step, masks),
            dense_by_mode={} if dense is None else divide(step, dense),
            last=None if self.last is None else step.take(np.flatnonzero(self.last)),
        )

    def _captured_step(self, engine: SparseCoordinator) -> DecodeStep:
        """All requests in one mode; the device decides which ones are dense."""
        if engine.not_capturable is not None:
            raise HiSparseError(
                f"a decode step cannot be captured: {engine.not_capturable}; expected an eager step"
            )
        step = self._undivided(engine)
        dense = engine.modes.dense_requests(step.num_pages, self.seq_lens)
        return replace(
            step,
            by_mode={"sparse": replace(step, rows=step.rows._replace(dense=dense))},
            dense_by_mode={"resident": step},
        )

    def _masks(self, engine: SparseCoordinator) -> tuple[ModeMasks, ModeMasks | None]:
        """The modes of a step in sparse layers and in dense layers, by the capacities now."""
        slots, seq_lens, residency = self.slots_cpu, self.seq_lens_cpu, engine.manager.residency
        residency.drop_replaced(slots, self.host_page_table)
        if engine.shareable is not None:
            engine.shareable.decode(slots, seq_lens, self.host_page_table)
        held = residency.held(slots)
        return engine.modes.of(seq_lens, held), engine.modes.of_dense_layers(seq_lens, held)

    def _count(self, engine: SparseCoordinator, masks: ModeMasks, dense: ModeMasks | None) -> None:
        """Count a step and tell the extensions of it."""
        engine.modes.count(engine.manager.counters, self.seq_lens_cpu, masks, dense)
        for choice, mask in engine.modes.choices(self.seq_lens_cpu, masks).items():
            engine.choices.add(choice, self.slots_cpu[mask], self.seq_lens_cpu[mask])
        engine.before_step(self.slots_cpu, self.seq_lens_cpu, masks.sparse)

    def _undivided(self, engine: SparseCoordinator) -> DecodeStep:
        policy, device = engine.policy, engine.manager.device
        heads, size = policy.heads, policy.kv.page_size
        head = torch.arange(heads, device=self.slots.device)
        rows = (self.slots[:, None] * heads + head).flatten()
        position = self.seq_lens - 1
        tail_lens = (position % size + 1).to(torch.int32)
        table = self.host_page_table
        if self.num_real is None:
            full = table.shape[1] - 1  # Beside the tail page.
            room = min(DecodeRows.table_pages(full), device.context_pages - 1)
            table = torch.nn.functional.pad(table, (0, room - full))
            num_real_rows = rows.new_full((1,), rows.numel(), dtype=torch.int32)
        else:
            num_real_rows = self.num_real * heads
        return DecodeStep(
            policy=policy,
            representations=engine.representations.tensors,
            slots=self.slots,
            tail_lens=tail_lens,
            kv_io=engine.manager.kv_io,
            seq_lens_cpu=self.seq_lens_cpu,
            host_slots=self.host_slots,
            rows=DecodeRows(
                rows=rows,
                capacity=device.capacity[rows],
                num_real_rows=num_real_rows,
                host_page_table=table,
                num_pages=(position // size).to(torch.int32),
                tail_pages=device.tail_pages[:, rows],
                tail_lens=tail_lens.repeat_interleave(heads),
                counts=engine.manager.counters.selected,
            ),
            follows=self.follows,
            captured=self.num_real is not None,
        )


class StaticBatch:
    """The inputs of the CUDA graphs of decode steps of all batch sizes.

    Rows after the requests are padding: one token in request slot 0 and host page 0, which no
    request uses. :meth:`SizingRequest.captured_bytes` accounts for it.

    Args:
        max_requests: the largest batch.
        num_pages: P, pages of the longest context.
        page_size: S, tokens.
        device: device of the tensors.
    """

    def __init__(
        self, max_requests: int, num_pages: int, page_size: int, device: torch.device
    ) -> None:
        # Slots, lengths and host slots.
        self._rows = torch.zeros(3, max_requests, dtype=torch.int64, device=device)
        self._table = torch.zeros(max_requests, num_pages, dtype=torch.int32, device=device)
        self._num_real = torch.zeros(1, dtype=torch.int32, device=device)
        self._bounds = np.full(max_requests, num_pages * page_size)
        self.load(None)

    def load(self, batch: DecodeBatch | None) -> None:
        """Write the requests of a step, then padding; None: padding only.

        Runs on the stream of the replay, without waiting for it.
        """
        count = 0 if batch is None else batch.slots.shape[0]
        if batch is not None:
            new = (batch.slots, batch.seq_lens, batch.host_slots)
            for static, values in zip(self._rows, new, strict=True):
                static[:count] = values
            self._table[:count, : batch.host_page_table.shape[1]] = batch.host_page_table
        self._rows[:, count:] = 0
        self._rows[1, count:] = 1
        self._num_real.fill_(count)

    def first(self, batch_size: int) -> DecodeBatch:
        """The first ``batch_size`` rows as a batch, views of the static tensors."""
        slots, seq_lens, host_slots = self._rows[:, :batch_size]
        bounds = self._bounds[:batch_size]
        return DecodeBatch(
            slots=slots,
            slots_cpu=np.zeros_like(bounds),
            seq_lens=seq_lens,
            seq_lens_cpu=bounds,
            host_slots=host_slots,
            host_page_table=self._table[:batch_size],
            num_real=self._num_real,
        )


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

    def begin(self, engine: SparseCoordinator) -> Forward:
        """See :class:`Batch`. Every request is served as in a forward of its own kind."""
        both = zip(
            self.prefill.contexts, (self.decode.slots_cpu, self.decode.seq_lens_cpu), strict=True
        )
        engine.start_forward(*map(np.concatenate, both))
        first, rest = self.prefill.prepare(engine), self.decode.prepare(engine)
        count = self.prefill.num_tokens
        halves = (first, slice(count)), (rest, slice(count, None))

        def attention(
            layer_id: int,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            indexer: IndexerInputs | None,
            sinks: Tensor | None,
        ) -> Tensor:
            outputs = [
                half.attention(layer_id, q[at], k[at], v[at], indexer and indexer.take(at), sinks)
                for half, at in halves
            ]
            return torch.cat(outputs)

        return Forward(attention, first.end)


def _after(prepare: Callable[[int], None], run: AttendLayer) -> AttendLayer:
    """Attention of a layer that ``prepare`` has made ready."""

    def attention(layer_id: int, *inputs: Any) -> Tensor:
        prepare(layer_id)
        return run(layer_id, *inputs)

    return attention
