"""Decode steps captured in CUDA graphs: static inputs, and the work before each replay.

This code has not run on a GPU yet. Tests record the operations of a step on a CPU and replay them.
"""

from __future__ import annotations

import numpy as np
import torch

from hisparse.engine.batches import DecodeBatch
from hisparse.engine.coordinator import SparseCoordinator


class StaticBatch:
    """The inputs of a CUDA graph of a decode step, for all batch sizes; written before each replay.

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


class CapturedSteps:
    """The work before and inside the graphs of all batch sizes.

    Args:
        coordinator: the engine.
        max_requests: the largest captured batch.
        context_length: tokens, the longest sequence.
        device: device of the model.
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
        """Load padding only, for a capture and for SGLang's warm-up steps before it.

        SGLang also captures while it serves, after an update of the weights.
        """
        self._coordinator.prepare_capture()
        self._batch.load(None)

    def before_replay(self, batch: DecodeBatch) -> bool:
        """Apply resets, capacities and counts, and load the requests into the static tensors.

        Returns:
            False if the graph cannot serve these requests; begin an eager step instead.
        """
        can_replay = batch.begin_replay(self._coordinator)
        if can_replay:
            self._batch.load(batch)
        return can_replay

    def begin(self, batch_size: int) -> None:
        """Begin the forward inside the graph, before the layers."""
        self._coordinator.forward_begin(self._batch.first(batch_size))
