"""Decode steps that are captured in CUDA graphs: their inputs, and what each replay needs.

Not yet run on a GPU; tests record the operations of a step on a CPU and replay them.
"""

from __future__ import annotations

import numpy as np
import torch

from hisparse.engine.coordinator import SparseCoordinator
from hisparse.engine.step import DecodeBatch
from hisparse.errors import HiSparseError

__all__ = ["CapturedSteps", "StaticBatch"]


class StaticBatch:
    """What a CUDA graph of a decode step reads: written before each replay, for all batch sizes.

    Rows behind the requests are padding: one token in request slot 0, whose page is host page 0,
    which no request uses either. Memory as in :meth:`SizingRequest.captured_bytes`.

    Args:
        max_requests: the largest batch.
        num_pages: P, pages of the longest context.
        page_size: S, tokens.
        device: where it lies.
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
        """Put the requests of a step in front, padding behind them; None: all is padding.

        Operations on the stream of the replay, and nothing that waits for it.
        """
        count = 0 if batch is None else batch.slots.shape[0]
        if batch is not None:
            given = (batch.slots, batch.seq_lens, batch.host_slots)
            for kept, new in zip(self._rows, given, strict=True):
                kept[:count] = new
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


class CapturedSteps:
    """What is done before, and inside, the graphs of all batch sizes.

    Args:
        coordinator: leads the step.
        max_requests: the largest batch that is captured.
        context_length: tokens, the longest sequence.
        device: where the model runs.
    """

    def __init__(
        self,
        coordinator: SparseCoordinator,
        max_requests: int,
        context_length: int,
        device: torch.device,
    ) -> None:
        self._coordinator = coordinator
        size = coordinator.policy.kv.page_size
        self._batch = StaticBatch(max_requests, -(-context_length // size), size, device)

    def before_capture(self) -> None:
        """A capture, and the steps that SGLang runs before it, are of padding alone."""
        self._batch.load(None)

    def before_replay(self, batch: DecodeBatch) -> None:
        """Resets, capacities and counts, and the requests into the tensors that graphs read.

        Raises:
            HiSparseError: a request is attended in a way that the graph does not hold.
        """
        if not self._coordinator.prepare_replay(batch):
            raise HiSparseError(
                f"a captured decode step got contexts of {batch.seq_lens_cpu.tolist()} tokens in "
                f"request slots {batch.slots_cpu.tolist()}, expected slots from 1 and dense "
                "contexts that fit their rows"
            )
        self._batch.load(batch)

    def begin(self, batch_size: int) -> None:
        """In the graph, before the layers."""
        self._coordinator.forward_begin(self._batch.first(batch_size))
