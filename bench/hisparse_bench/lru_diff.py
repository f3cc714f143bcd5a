"""``hisparse bench lru-diff``: finding the resident, evicted and loaded pages of selections."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hisparse.errors import ConfigError
from hisparse.kernels import RowState, lru_diff
from hisparse_bench import peers
from hisparse_bench.options import Options
from hisparse_bench.report import Case, Result
from hisparse_bench.timing import Candidate, time_in_turns


@dataclass(frozen=True, kw_only=True)
class LruDiffBench:
    """Decode steps in which each selection shares ``overlap`` with the one before.

    Attributes:
        rows: R, rows of the batch.
        width: K, pages of a selection.
        slots: C, device slots of a row.
        overlap: fraction of a selection that the next one keeps; the others are misses.
    """

    rows: int = 8
    width: int = 2048
    slots: int = 4096
    overlap: float = 0.85

    def run(self, options: Options) -> Case:
        """Time all implementations on the same steps; the gate compares every output."""
        if self.width > self.slots:
            raise ConfigError(f"--width: got {self.width}, expected at most --slots {self.slots}")
        chain = drifting_selections(
            self.rows, self.width, self.slots, self.overlap, options.num_steps + 3, options.seed
        )
        table = torch.randperm(int(chain.max()) + 1).int().expand(self.rows, -1).contiguous()
        work = _LruDiffWorkload(self.slots, chain.to(options.device), table.to(options.device))
        gate = "passed" if all(work.agree(impl) for impl in self._others(options)) else "failed"
        times = time_in_turns(
            {impl: work.candidate(impl) for impl in ["reference", *self._others(options)]},
            options.num_steps,
            device=options.device,
        )
        return Case(
            name="lru-diff",
            params={
                "rows": self.rows,
                "width": self.width,
                "slots": self.slots,
                "pages": table.shape[1],
                "miss_ratio": round(1 - round(self.width * self.overlap) / self.width, 4),
                "threads": torch.get_num_threads(),
                "cache": "warm: tables and results of the step before",
            },
            gate=gate,
            results=[Result.of(impl, seconds) for impl, seconds in times.items()],
        )

    @staticmethod
    def _others(options: Options) -> list[str]:
        """Implementations to compare with the reference."""
        return ["numpy", "cpu"] if options.device.type == "cpu" else ["cuda"]


def drifting_selections(
    rows: int, width: int, slots: int, overlap: float, num_steps: int, seed: int
) -> Tensor:
    """Selections of which a fixed number of pages is replaced at each step.

    A replaced page returns only after at least ``slots`` other pages were selected, so that every
    new page of a selection is a miss.

    Returns:
        ``[steps, rows, width] int32``.
    """
    rng = np.random.default_rng(seed)
    replaced = width - round(width * overlap)
    # Each row takes pages from the front of a queue and appends the pages that it drops.
    num_pages = max(2 * slots, width + replaced) + width
    chain = np.empty((num_steps, rows, width), np.int32)
    for r in range(rows):
        pages = rng.permutation(num_pages).astype(np.int32)
        selected, queue = pages[:width], pages[width:]
        for step in range(num_steps):
            chain[step, r] = selected
            drop = rng.choice(width, replaced, replace=False)
            queue = np.concatenate([queue, selected[drop]])
            selected = selected.copy()
            selected[drop], queue = queue[:replaced], queue[replaced:]
    return torch.from_numpy(chain)


class _LruDiffWorkload:
    """Selections of all steps, and a separate state for each implementation.

    Args:
        slots: C.
        chain: ``[steps, R, K] int32``.
        table: ``[R, P] int32``.
    """

    def __init__(self, slots: int, chain: Tensor, table: Tensor) -> None:
        self._slots, self._chain, self._table = slots, chain, table
        # A step's input is in the processor's caches, as if it had just been selected.
        self._selection = chain[0].clone()

    def load(self, step: int) -> None:
        """Make the selection of a step the input."""
        self._selection.copy_(self._chain[step])

    def candidate(self, impl: str) -> Candidate:
        """``impl`` on the loaded selection; a step returns its results."""
        rows, device = self._chain.shape[1], self._chain.device
        slot = torch.arange(self._slots, dtype=torch.int32, device=device).repeat(rows, 1)
        state = RowState.empty(slot.clone(), slot.clone(), self._table.shape[1])
        capacity = torch.full((rows,), self._slots, dtype=torch.int32, device=device)
        real = torch.full((1,), rows, dtype=torch.int32, device=device)
        inputs = (self._selection, self._table, capacity)
        if impl == "numpy":
            arrays = [t.numpy() for t in (*inputs, state.slot_pages, state.lru_order)]
            return Candidate(lambda step: peers.lru_diff(*arrays), self.load)
        index = torch.arange(rows, device=device)
        return Candidate(
            lambda step: lru_diff(*inputs, real, state, rows=index, impl=impl), self.load
        )

    def agree(self, impl: str) -> bool:
        """Whether ``impl`` equals the reference bit for bit in every step."""
        candidate, reference = self.candidate(impl), self.candidate("reference")
        for step in range(len(self._chain)):
            self.load(step)
            got, expected = candidate.run(step), reference.run(step)
            if not all(
                torch.equal(torch.as_tensor(a), b) for a, b in zip(got, expected, strict=True)
            ):
                return False
        return True
