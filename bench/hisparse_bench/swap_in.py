"""``hisparse bench swap-in``: from a selection to resident pages in one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hisparse.cache import HostKVPool
from hisparse.errors import ConfigError
from hisparse.kernels import DecodeRows, RowState, diff_tables, gather_pages
from hisparse.types import KVSpec, PagedKV
from hisparse_bench.lru_diff import drifting_selections
from hisparse_bench.options import Options
from hisparse_bench.peers import fused_swap_in, reason_to_leave_out
from hisparse_bench.report import Case, Result
from hisparse_bench.timing import Candidate, time_in_turns


@dataclass(frozen=True, kw_only=True)
class SwapInBench:
    """``lru_diff`` and the transfer of misses, for selections of tokens of an MLA model.

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
        if self.width > self.slots:
            raise ConfigError(f"--width: got {self.width}, expected at most --slots {self.slots}")
        chain = drifting_selections(
            self.batch, self.width, self.slots, 1 - self.misses, options.num_steps + 3, options.seed
        )
        host = self._pool(chain, options)
        work = _SwapInWorkload(host, chain.to(options.device), self.slots)
        ours = options.device.type
        gate = "passed" if work.agrees(work.candidate(ours)) else "failed"
        candidates = {"reference": work.candidate("reference")}
        left_out = {}
        if ours == "cuda":
            reason = reason_to_leave_out(lambda: work.agrees(work.upstream()))
            left_out = {"left_out": f"sglang_fused: {reason}"} if reason else {}
            candidates |= {} if reason else {"sglang_fused": work.upstream()}
        times = time_in_turns(
            candidates | {ours: work.candidate(ours)},
            options.num_steps,
            device=options.device,
        )
        replaced = self.width - round(self.width * (1 - self.misses))
        moved = self.batch * replaced * self.row_bytes
        return Case(
            name="swap-in",
            params={
                "batch": self.batch,
                "width": self.width,
                "slots": self.slots,
                "miss_ratio": round(replaced / self.width, 4),
                "row_bytes": self.row_bytes,
                "pool_bytes": host.num_bytes,
                "bytes": moved,
                "threads": torch.get_num_threads(),
                "cache": "cold source, warm destination",
            }
            | left_out,
            gate=gate,
            results=[Result.of(impl, seconds, moved) for impl, seconds in times.items()],
        )

    def _pool(self, chain: Tensor, options: Options) -> HostKVPool:
        kv = KVSpec(
            num_layers=1,
            num_q_heads=1,
            num_kv_heads=1,
            head_dim=self.row_bytes // 8,
            v_head_dim=0,
            dtype=torch.float64,
            page_size=1,
        )
        tokens = max(self.batch * (int(chain.max()) + 1), self.pool_bytes // self.row_bytes)
        pool = HostKVPool(kv, tokens, "layer_first", pin=options.device.type == "cuda")
        rows = pool.layer(0).k.view(torch.int64)
        # Every token is different and written, because untouched memory is one shared page.
        rows.copy_(torch.arange(tokens).view(-1, 1, 1, 1).expand_as(rows))
        return pool


class _SwapInWorkload:
    """Selections of all steps, and separate device pages for each implementation."""

    def __init__(self, host: HostKVPool, chain: Tensor, slots: int) -> None:
        self._chain, self._slots = chain, slots
        k = host.layer(0).k
        self._host = PagedKV(k, k)  # Keys and values of a latent are the same bytes.
        rows, pages = chain.shape[1], int(chain.max()) + 1
        table = torch.randperm(host.num_pages)[: rows * pages].view(rows, pages)
        self._table = table.int().to(chain.device)
        self._selection = chain[0].clone()

    def _load(self, step: int) -> None:
        self._selection.copy_(self._chain[step])

    def candidate(self, impl: str) -> Candidate:
        """``impl``; a step returns each selected token's index into the device pages, and them."""
        rows, device = self._chain.shape[1], self._chain.device
        slot = torch.arange(self._slots, dtype=torch.int32, device=device).repeat(rows, 1)
        pages = torch.arange(slot.numel(), dtype=torch.int32, device=device).view_as(slot)
        state = RowState.empty(slot, pages, self._table.shape[1])
        capacity = torch.full((rows,), self._slots, dtype=torch.int32, device=device)
        real = torch.full((1,), rows, dtype=torch.int32, device=device)
        index = torch.arange(rows, device=device)
        # Every selected token is a page of its own: no tail page is attended here.
        lengths, tails = torch.full_like(capacity, self._chain.shape[2]), torch.zeros_like(capacity)
        counts = torch.full_like(capacity, self._table.shape[1])
        own = DecodeRows(index, capacity, real, self._table, counts, tails, tails)
        k = torch.zeros(slot.numel(), *self._host.k.shape[1:], dtype=torch.float64, device=device)

        def step(number: int) -> tuple[Tensor, Tensor]:
            tables = diff_tables(self._selection, lengths, own, state, page_size=1, impl=impl)
            gather_pages(self._host, tables.load_host_pages, PagedKV(k, k), tables.loads, impl=impl)
            return tables.attended[:, :-1], k

        return Candidate(step, self._load)

    def upstream(self) -> Candidate:
        """SGLang's fused kernel on the same selections."""
        host = self._host.k.flatten(1).view(torch.uint8)
        swap_in = fused_swap_in(host, self._table, self._chain.shape[2], self._slots)
        return Candidate(lambda step: swap_in(self._selection), self._load)

    def agrees(self, candidate: Candidate) -> bool:
        """Whether every selected token's bytes are resident after each step."""
        for step in range(len(self._chain)):
            self._load(step)
            found, k = candidate.run(step)
            source = self._table.gather(1, self._selection.long()).cpu().long()
            got = k[found.flatten().long()].cpu().flatten(1).view(torch.uint8)
            expected = self._host.k[source.flatten()].flatten(1).view(torch.uint8)
            if not torch.equal(got, expected):
                return False
        return True
