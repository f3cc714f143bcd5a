"""``hisparse bench diff-tables``, ``transfer`` and ``swap-in``: what brings selected pages in."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hisparse.cache import HostKVPool
from hisparse.errors import ConfigError
from hisparse.kernels import DecodeRows, DiffTables, RowState, diff_tables, gather_pages
from hisparse.kernels.operation import ResultMemory
from hisparse.types import HostLayout, KVSpec, PagedKV, Selection
from hisparse_bench.options import Options
from hisparse_bench.peers import fused_swap_in, reason_to_leave_out
from hisparse_bench.report import Case
from hisparse_bench.timing import WARMUPS, Candidate, timed_case


def drifting_selections(
    rows: int, width: int, slots: int, misses: float, options: Options
) -> Tensor:
    """Selections of which the share ``misses`` is replaced at each step.

    A replaced page returns only after at least ``slots`` other pages were selected, so that every
    new page of a selection is a miss.

    Returns:
        ``[steps, rows, width] int32``, a selection for each timed step and each before those.

    Raises:
        ConfigError: a selection does not fit a row.
    """
    if width > slots:
        raise ConfigError(f"--width: got {width}, expected at most --slots {slots}")
    rng = np.random.default_rng(options.seed)
    replaced = num_replaced(width, misses)
    # Each row takes pages from the front of a queue and appends the pages that it drops.
    num_pages = max(2 * slots, width + replaced) + width
    chain = np.empty((options.num_steps + WARMUPS, rows, width), np.int32)
    for r in range(rows):
        pages = rng.permutation(num_pages).astype(np.int32)
        selected, queue = pages[:width], pages[width:]
        for selections in chain:
            selections[r] = selected
            drop = rng.choice(width, replaced, replace=False)
            queue = np.concatenate([queue, selected[drop]])
            selected = selected.copy()
            selected[drop], queue = queue[:replaced], queue[replaced:]
    return torch.from_numpy(chain)


def num_replaced(width: int, misses: float) -> int:
    """Pages of a selection that are misses."""
    return width - round(width * (1 - misses))


class _Rows:
    """Selections of all steps, and the inputs of an implementation that follows them.

    Args:
        chain: ``[steps, R, K] int32``.
        slots: C.
        num_host_pages: pages that the rows' tables are drawn from.

    Attributes:
        selection: ``[R, K] int32``, of the step that was loaded: in the processor's caches, as if
            it had just been selected.
        table: ``[R, P] int32``, host pages.
    """

    def __init__(self, chain: Tensor, slots: int, num_host_pages: int) -> None:
        self.chain, self.slots = chain, slots
        rows, pages = chain.shape[1], int(chain.max()) + 1
        table = torch.randperm(num_host_pages)[: rows * pages].view(rows, pages)
        self.table = table.int().to(chain.device)
        self.selection = chain[0].clone()

    def load(self, step: int) -> None:
        """Make the selection of a step the input."""
        self.selection.copy_(self.chain[step])

    def diff(self, impl: str, page_size: int) -> Callable[[], DiffTables]:
        """``diff_tables`` of the selection, on tables of its own that are empty at first."""
        rows, device = self.chain.shape[1], self.chain.device
        slot = torch.arange(self.slots, dtype=torch.int32, device=device).repeat(rows, 1)
        pages = torch.arange(slot.numel(), dtype=torch.int32, device=device).view_as(slot)
        index = slot.new_full((rows, self.table.shape[1]), -1)
        state = RowState(torch.full_like(slot, -1), slot, pages, index)
        capacity = torch.full((rows,), self.slots, dtype=torch.int32, device=device)
        real = torch.full((1,), rows, dtype=torch.int32, device=device)
        # Every entry of a selection is another full page.
        lengths, tails = torch.full_like(capacity, self.chain.shape[2]), torch.zeros_like(capacity)
        counts = torch.full_like(capacity, self.table.shape[1])
        own = torch.arange(rows, device=device)
        step = DecodeRows(own, capacity, real, self.table, counts, tails, tails)
        chosen = Selection(self.selection, lengths)
        memory = ResultMemory()  # As in a step.

        def run() -> DiffTables:
            with memory:
                return diff_tables(chosen, step, state, page_size=page_size, impl=impl)

        return run

    def num_bytes(self, misses: int) -> int:
        """Bytes that a step with ``misses`` a row has to read and write.

        It reads the selection, what every slot holds, the order, and a device page for each entry
        and each load. It writes the order, and for each load the slot's page, whose host page it
        reads. It writes the results. CUDA's own index of pages, ``page_slots``, is not counted.
        """
        _, rows, width = self.chain.shape
        read = width + 2 * self.slots + (width + misses) + misses
        written = self.slots + misses + (3 * width + 4)
        return 4 * rows * (read + written)

    def all_steps(self, check: Callable[[int], bool]) -> bool:
        """Whether a check of each step passes, in order."""
        for step in range(len(self.chain)):
            self.load(step)
            if not check(step):
                return False
        return True


@dataclass(frozen=True, kw_only=True)
class DiffTablesBench:
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
        """Time the reference and the device's kernel; the gate compares every output."""
        misses = 1 - self.overlap
        replaced = num_replaced(self.width, misses)
        chain = drifting_selections(self.rows, self.width, self.slots, misses, options)
        rows = _Rows(chain.to(options.device), self.slots, self.rows * (int(chain.max()) + 1))

        def candidate(impl: str) -> Candidate:
            diff = rows.diff(impl, page_size=16)
            return Candidate(lambda step: diff(), rows.load)

        ours, reference = candidate(options.device.type), candidate("reference")

        def agrees(step: int) -> bool:
            # No row is away.
            return all(map(torch.equal, ours.run(step)[:6], reference.run(step)[:6]))

        return timed_case(
            "diff-tables",
            {
                "rows": self.rows,
                "width": self.width,
                "slots": self.slots,
                "pages": rows.table.shape[1],
                "miss_ratio": round(replaced / self.width, 4),
                "cache": "warm: tables and results of the step before",
            },
            {impl: candidate(impl) for impl in ("reference", options.device.type)},
            options,
            agrees=lambda: rows.all_steps(agrees),
            moved=lambda: rows.num_bytes(replaced),
        )


@dataclass(frozen=True, kw_only=True)
class TransferBench:
    """Gathers pages into device pages; each step reads pages that no earlier step has read.

    Attributes:
        pool_bytes: bytes of the host pool, keys and values.
        page_bytes: bytes of a page's keys; its values take as many.
        pages: pages gathered in a step.
    """

    pool_bytes: int = 4 << 30
    page_bytes: int = 4096
    pages: int = 2048

    def run(self, options: Options) -> Case:
        """Time all; the gate compares every gathered page. ``memcpy`` copies contiguous bytes."""
        moved, steps = self.pages * 2 * self.page_bytes, options.num_steps + WARMUPS
        if self.page_bytes % 64 or self.page_bytes <= 0:
            raise ConfigError(f"--page-bytes: got {self.page_bytes}, expected a multiple of 64")
        if steps * moved > self.pool_bytes:
            raise ConfigError(
                f"--pool-bytes: got {self.pool_bytes}, expected {steps * moved} or more, so that "
                f"each of {steps} steps reads pages of its own"
            )
        num_pages = self.pool_bytes // (2 * self.page_bytes)
        shape: dict[str, Any] = {
            "head_dim": self.page_bytes // 64,
            "v_head_dim": self.page_bytes // 64,
        }
        shape |= {"dtype": torch.float32, "page_size": 16}
        host = _host_pool(options, num_pages, "page_head", **shape)
        # Written once, because untouched memory is mapped to one shared page of zeros.
        for pages in host.layer(0):
            pages.view(torch.int32).copy_(_pattern(pages.shape))
        work = _Gathers(host, self.pages, options)
        return timed_case(
            "transfer",
            {
                "pool_bytes": host.num_bytes,
                "page_bytes": self.page_bytes,
                "pages": self.pages,
                "cache": "cold source, warm destination",
            },
            {
                "reference": Candidate(lambda step: work.gather(step, "reference")),
                "memcpy": Candidate(work.contiguous),
                options.device.type: Candidate(work.gather),
            },
            options,
            agrees=work.agrees,
            moved=lambda: moved,
        )


def _host_pool(options: Options, num_pages: int, layout: HostLayout, **kv: Any) -> HostKVPool:
    spec = KVSpec(num_layers=1, num_q_heads=1, num_kv_heads=1, **kv)
    return HostKVPool(spec, num_pages, layout, pin=options.device.type == "cuda")


def _pattern(shape: torch.Size) -> Tensor:
    """Values that differ between the words of a page and between pages."""
    words = torch.arange(shape[1:].numel(), dtype=torch.int32).view(shape[1:])
    page = torch.arange(shape[0], dtype=torch.int32).view(-1, 1, 1, 1)
    return words + (page << 10)


class _Gathers:
    """The pages of each step, and the implementations that move them."""

    def __init__(self, host: HostKVPool, pages: int, options: Options) -> None:
        self._host, self._pages = host.layer(0), pages
        generator = torch.Generator().manual_seed(options.seed)
        order = torch.randperm(host.num_pages, generator=generator, dtype=torch.int64).int()
        count = (options.num_steps + WARMUPS) * pages
        self._lists = order[:count].view(-1, 1, pages).to(options.device)
        shape = (pages, *self._host.k.shape[1:])
        self._device = PagedKV(*(torch.zeros(shape, device=options.device) for _ in range(2)))
        self._targets = torch.arange(pages, dtype=torch.int32, device=options.device)[None]

    def gather(self, step: int, impl: str = "auto") -> None:
        """Gather the step's pages."""
        gather_pages(self._host, self._lists[step], self._device, self._targets, impl=impl)

    def contiguous(self, step: int) -> None:
        """Copy as many contiguous bytes, which no other step has read."""
        first = step * self._pages
        for target, source in zip(self._device, self._host, strict=True):
            part = source[first : first + self._pages]
            if target.is_cuda:
                target.copy_(part, non_blocking=True)
            else:
                ctypes.memmove(target.data_ptr(), part.data_ptr(), part.nbytes)

    def agrees(self) -> bool:
        """Whether every step's pages equal the pool's bit for bit."""
        for step in range(len(self._lists)):
            for pages in self._device:
                pages.fill_(torch.nan)
            self.gather(step)
            index = self._lists[step, 0].cpu().long()
            for target, source in zip(self._device, self._host, strict=True):
                if not torch.equal(target.cpu().view(torch.int32), source[index].view(torch.int32)):
                    return False
        return True


@dataclass(frozen=True, kw_only=True)
class SwapInBench:
    """``diff_tables`` and the transfer of misses, for selections of tokens of an MLA model.

    Attributes:
        batch: requests, a row each.
        width: K, tokens of a selection.
        slots: C, tokens of a row's device buffer.
        misses: fraction of a selection that is not resident.
        row_bytes: bytes of one token's latent.
        pool_bytes: bytes of the host pool, at least.
    """

    batch: int = 1
    width: int = 2048
    slots: int = 4096
    misses: float = 0.15
    row_bytes: int = 1152
    pool_bytes: int = 1 << 30

    def run(self, options: Options) -> Case:
        """Time all; after every step the gate compares each selected token's bytes."""
        if self.row_bytes % 8 or self.row_bytes <= 0:
            raise ConfigError(f"--row-bytes: got {self.row_bytes}, expected a multiple of 8")
        chain = drifting_selections(self.batch, self.width, self.slots, self.misses, options)
        tokens = max(self.batch * (int(chain.max()) + 1), self.pool_bytes // self.row_bytes)
        shape: dict[str, Any] = {"head_dim": self.row_bytes // 8, "v_head_dim": 0}
        shape |= {"dtype": torch.float64, "page_size": 1}
        host = _host_pool(options, tokens, "layer_first", **shape)
        rows = host.layer(0).k.view(torch.int64)
        # Every token is different and written, because untouched memory is one shared page.
        rows.copy_(torch.arange(tokens).view(-1, 1, 1, 1).expand_as(rows))
        work = _SwapIns(host, chain.to(options.device), self.slots)
        ours = options.device.type
        candidates, left_out = {"reference": work.candidate("reference")}, {}
        if ours == "cuda":
            reason = reason_to_leave_out(lambda: work.agrees(work.upstream()))
            left_out = {"left_out": f"sglang_fused: {reason}"} if reason else {}
            candidates |= {} if reason else {"sglang_fused": work.upstream()}
        replaced = num_replaced(self.width, self.misses)
        return timed_case(
            "swap-in",
            {
                "batch": self.batch,
                "width": self.width,
                "slots": self.slots,
                "miss_ratio": round(replaced / self.width, 4),
                "row_bytes": self.row_bytes,
                "pool_bytes": host.num_bytes,
                "cache": "cold source, warm destination",
            }
            | left_out,
            candidates | {ours: work.candidate(ours)},
            options,
            agrees=lambda: work.agrees(work.candidate(ours)),
            moved=lambda: self.batch * replaced * self.row_bytes,
        )


class _SwapIns(_Rows):
    """Selections of all steps, and separate device pages for each implementation."""

    def __init__(self, host: HostKVPool, chain: Tensor, slots: int) -> None:
        super().__init__(chain, slots, host.num_pages)
        k = host.layer(0).k
        self._host = PagedKV(k, k)  # Keys and values of a latent are the same bytes.

    def candidate(self, impl: str) -> Candidate:
        """``impl``; a step returns each selected token's index into the device pages, and them."""
        diff = self.diff(impl, page_size=1)
        shape = (self.chain.shape[1] * self.slots, *self._host.k.shape[1:])
        k = torch.zeros(shape, dtype=torch.float64, device=self.chain.device)

        def step(number: int) -> tuple[Tensor, Tensor]:
            tables = diff()
            gather_pages(self._host, tables.load_host_pages, PagedKV(k, k), tables.loads, impl=impl)
            return tables.attended[:, :-1], k

        return Candidate(step, self.load)

    def upstream(self) -> Candidate:
        """SGLang's fused kernel on the same selections."""
        host = self._host.k.flatten(1).view(torch.uint8)
        swap_in = fused_swap_in(host, self.table, self.chain.shape[2], self.slots)
        return Candidate(lambda step: swap_in(self.selection), self.load)

    def agrees(self, candidate: Candidate) -> bool:
        """Whether every selected token's bytes are resident after each step."""

        def check(step: int) -> bool:
            found, k = candidate.run(step)
            source = self.table.gather(1, self.selection.long()).cpu().long()
            got = k[found.flatten().long()].cpu().flatten(1).view(torch.uint8)
            expected = self._host.k[source.flatten()].flatten(1).view(torch.uint8)
            return torch.equal(got, expected)

        return self.all_steps(check)
