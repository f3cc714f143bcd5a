"""Decode steps that SGLang captures in CUDA graphs; not yet run on a GPU."""

from __future__ import annotations

import torch

from hisparse.engine.coordinator import SparseCoordinator
from hisparse.engine.graphs import StaticBatch
from hisparse.engine.step import DecodeBatch
from hisparse.errors import HiSparseError

__all__ = ["CapturedSteps"]


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
