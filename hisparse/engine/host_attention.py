"""Attention by the CPU over pages where they lie, in host memory."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from hisparse.adapters import Attended, TorchAdapter, merge_attended
from hisparse.algorithms import DecodeStep, SelectionPolicy
from hisparse.cache import SparseKVCacheManager
from hisparse.cache.allocate import zeros
from hisparse.cache.kv_io import move_pages
from hisparse.cache.streams import Pending
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.kernels import DiffTables, HostAttentionCalls, paged_attention
from hisparse.kernels.build import cuda
from hisparse.kernels.build.cpu import cpu_library
from hisparse.memory.costs import AwayBytes, away_bytes
from hisparse.types import AttentionRule, Pages

logger = logging.getLogger(__name__)

#: What "auto" expects: the share of a selection that is missing, and the seconds that CUDA takes to
#: call the CPU and to bring q there and the result back. Estimates: no GPU has run it.
_MISSES, _CALL = 0.05, 20e-6
#: Bytes of pages that "auto" times, in runs of other pages each: caches have none of them.
_TIMED_BYTES, _TIMED_RUNS = 256 << 20, 4


def make_host_attention(
    config: HiSparseConfig, manager: SparseKVCacheManager, policy: SelectionPolicy
) -> HostAttention | None:
    """What attends missing pages on the CPU; None: they are always loaded.

    Raises:
        ConfigError: there are no native kernels for a GPU.
    """
    if config.miss == "transfer":
        return None
    if manager.device.device.type == "cpu":
        host = HostAttention(manager, policy)
    elif config.miss == "auto" and not _native():
        return None
    else:
        most = len(manager.residency.capacities.live) - 1
        host = CudaHostAttention(manager, policy, away_bytes(config, policy, most))
    if config.miss == "auto":
        host.measure()
    return host if host.min_requests < math.inf else None


class HostAttention:
    """Attends what was not on the device, and whole contexts, on a CPU.

    Attributes:
        attends_contexts: whether :meth:`attend_contexts` is there.
        min_requests: the smallest step whose missing pages it attends; infinite: none is.
        threads: that it takes.
    """

    attends_contexts: ClassVar[bool] = True
    min_requests: float = 0

    def __init__(self, manager: SparseKVCacheManager, policy: SelectionPolicy) -> None:
        self._manager, self._policy = manager, policy
        self.threads = torch.get_num_threads()
        attend_with = manager.host.format.attend_with
        self._attend_rows = attend_with(_RowsOfHeads(policy.heads), policy.max_pages)
        self._attend_tokens = attend_with(_RowsOfHeads(1), policy.max_pages)

    def serves(self, step: DecodeStep) -> bool:
        """Whether it attends the missing pages of a step, by its requests that select pages."""
        return len(step.by_mode.get("sparse", step).slots) >= self.min_requests

    def measure(self) -> None:
        """Choose ``min_requests``, by the seconds of a page over the link and on the CPU."""
        stored, pages = self._manager.host.stored(0), self._manager.device.stored(0)
        policy, heads, device = self._policy, self._policy.heads, self._manager.device.device
        page_bytes = self._manager.device.page_bytes
        count = min(_TIMED_BYTES // page_bytes, len(stored.k), len(pages.k))
        rows = min(8, count // heads) * heads
        table = torch.arange(count // rows * rows, dtype=torch.int32).view(rows, -1)
        parts = table.chunk(_TIMED_RUNS, dim=1)
        shape = rows, policy.kv.num_q_heads // heads, policy.kv.head_dim
        queries = torch.ones(shape, dtype=policy.kv.dtype)

        def load(part: Tensor) -> None:
            move_pages(stored, part, pages, part, heads=heads)

        def attend(part: Tensor) -> None:
            lens = torch.full((rows,), part.shape[1] * policy.kv.page_size, dtype=torch.int32)
            self._attend_rows(queries, stored, part.contiguous(), lens, policy.attention_rule)

        link = _seconds_a_page(load, [x.to(device) for x in parts], device)
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        cpu = _seconds_a_page(attend, parts, device)
        torch.set_num_threads(before)
        gained = _MISSES * policy.max_pages * heads * (link - cpu)  # of a request
        self.min_requests = math.ceil(_CALL / gained) if gained > 0 else math.inf
        logger.info(
            'miss "auto": the link brings %.1f GB/s of pages, %d threads attend %.1f: %s',
            page_bytes / link / 1e9,
            self.threads,
            page_bytes / cpu / 1e9,
            f"they do from {self.min_requests} requests on" if gained > 0 else "pages are loaded",
        )

    def start(
        self, layer_id: int, queries: Tensor, tables: DiffTables, rule: AttentionRule
    ) -> Pending[Attended]:
        """Start to attend the pages that are away, beside the forward.

        ``queries [R, Q, D]``, model's dtype -> out ``[R, Q, Dv]``, lse ``[R, Q]``, float32; 0 and
        -inf for rows without such pages.
        """
        return self._manager.aside.start(partial(self._attend, layer_id, queries, tables, rule))

    def _attend(
        self, layer_id: int, queries: Tensor, tables: DiffTables, rule: AttentionRule
    ) -> Attended:
        assert tables.away is not None
        host = self._manager.host
        # Missing pages are full: the tail page is on the device.
        lens = tables.away * host.kv.page_size
        return self._attend_rows(queries, host.stored(layer_id), tables.load_host_pages, lens, rule)

    def raise_error(self) -> None:
        """Raise what went wrong in earlier steps, if nobody could raise it there.

        Raises:
            KernelError: one line about the first error.
        """

    def attend_contexts(
        self, layer_id: int, q: Tensor, step: DecodeStep, sinks: Tensor | None
    ) -> Tensor:
        """Attend ``q [B, Hq, D]`` over whole contexts -> ``[B, Hq, Dv] float32``.

        Requests run one by one: the order of summation depends on one request. ``sinks [Hq]``, any
        float dtype: see :meth:`SparseCoordinator.attention`.
        """
        manager, parts = self._manager, []
        size, stored = manager.host.kv.page_size, manager.host.stored(layer_id)
        lens = step.seq_lens.to(torch.int32)
        for request, length in enumerate(step.seq_lens_cpu.tolist()):
            one, count = slice(request, request + 1), -(-length // size)
            num_bytes = count * size * manager.host.format.layer_token_bytes
            manager.counters.add("streamed_decode_bytes", num_bytes)
            table = step.host_page_table[one, :count]
            part = self._attend_tokens(
                q[one], stored, table, lens[one], self._policy.attention_rule
            )
            parts.append(merge_attended(part, sinks=sinks).out)
        return torch.cat(parts)


class CudaHostAttention(HostAttention):
    """Attends for a GPU what was not there, in the order of the side stream.

    Queries and page numbers are copied to page-locked memory, CUDA's driver calls C++, and the
    results are copied back. So a graph captures it, and nobody waits but the stream.

    Args:
        sizes: of the page-locked memory, for the largest step.

    Raises:
        ConfigError: there are no native kernels.
    """

    attends_contexts = False

    def __init__(
        self, manager: SparseKVCacheManager, policy: SelectionPolicy, sizes: AwayBytes
    ) -> None:
        super().__init__(manager, policy)
        if not _native():
            raise ConfigError(
                'miss: got "host" without native kernels, expected "transfer": CUDA calls C++'
            )
        self.threads = _threads_of_a_gpu()
        self._calls = HostAttentionCalls(policy.heads, self.threads)
        dtypes = policy.kv.dtype, torch.int32, torch.float32
        #: Queries, pages and results, a row each. Calls follow each other: one set is enough.
        self._pinned = [
            zeros((size // dtype.itemsize,), dtype, torch.device("cpu"), pin=True)
            for size, dtype in zip(sizes, dtypes, strict=True)
        ]

    def _attend(
        self, layer_id: int, queries: Tensor, tables: DiffTables, rule: AttentionRule
    ) -> Attended:
        host, pages = self._manager.host, tables.load_host_pages
        query, table, results = self._pinned
        query = query[: queries.numel()].view(queries.shape)
        table = table[: pages.numel()].view(pages.shape)
        results = results[: queries.shape[0] * queries.shape[1] * (host.kv.v_head_dim + 1)]
        query.copy_(queries.contiguous(), non_blocking=True)
        table.copy_(pages, non_blocking=True)
        parts = _split(results, queries)
        self._calls.launch(pages, layer_id, query, host.stored(layer_id), table, parts, rule)
        own = torch.empty_like(results, device=pages.device)
        return _split(own.copy_(results, non_blocking=True), queries)

    def raise_error(self) -> None:
        self._calls.raise_error()


def _native() -> bool:
    """Whether CUDA's driver can call C++."""
    return cuda.cuda_library() is not None and cpu_library() is not None


def _threads_of_a_gpu() -> int:
    """This process's cores, shared by the GPUs that it sees, but one, for the server's Python."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, torch.cuda.device_count()) - 1)


def _seconds_a_page(
    run: Callable[[Tensor], None], parts: Sequence[Tensor], device: torch.device
) -> float:
    """The least time of a page among runs of parts, after a run of the first one."""

    def timed(part: Tensor) -> float:
        begin = time.perf_counter()
        run(part)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) / part.numel()

    timed(parts[0])
    return min(timed(part) for part in parts[1:] or parts)


def _split(results: Tensor, queries: Tensor) -> Attended:
    """``results`` of ``queries [R, Q, D]`` as out ``[R, Q, Dv]`` and lse ``[R, Q]``, views."""
    lines = queries.shape[0] * queries.shape[1]
    out, lse = results.tensor_split([len(results) - lines])
    return Attended(out.view(*queries.shape[:2], -1), lse.view(queries.shape[:2]))


class _RowsOfHeads(TorchAdapter):
    """Each row attends one head of pages that have all, or with ``heads`` 1 all of them."""

    def __init__(self, heads: int) -> None:
        self._heads = heads

    def attend(
        self, q: Tensor, kv: Pages, page_table: Tensor, seq_lens: Tensor, rule: AttentionRule
    ) -> Attended:
        heads = self._heads
        return Attended(*paged_attention(q, kv, page_table, seq_lens, rule=rule, heads=heads))
