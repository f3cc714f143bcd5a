"""A model-free server: requests with random K/V, served by the real coordinator and checked
against attention in float64 over exactly the positions that were to be attended."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hisparse.adapters import TorchAdapter
from hisparse.algorithms import BaseSparseAlgorithm, Quest
from hisparse.batch import DecodeBatch, PrefillBatch, PrefillChunk, SelectionPolicy
from hisparse.cache import DeviceBuffer, HostKVPool, SparseKVCacheManager
from hisparse.cache.capacity import CapacityPlanner
from hisparse.coordinator import SparseCoordinator
from hisparse.metrics import CacheCounters
from hisparse.types import HostLayout, KVSpec, SelectionScope

SCALE = 0.3


@dataclass
class Request:
    """K, V ``[L, n, Hkv, D]`` and Q ``[L, n, Hq, D]`` of every position, known from the start."""

    slot: int
    q: Tensor
    k: Tensor
    v: Tensor
    host_pages: list[int]
    done: int = 0

    @property
    def length(self) -> int:
        return self.k.shape[1]


@dataclass
class Simulator:
    """Holds a coordinator and plays the framework's part: host pages, slots, batches."""

    scope: SelectionScope = "kv_head"
    layout: HostLayout = "page_head"
    budget: int = 32
    device_buffer: int = 64
    max_row: int = 128
    device_pages: int | None = None
    num_slots: int = 5
    host_pages: int = 200
    staging_pages: int = 3
    min_sparse_context: int = 0
    dense_layers: tuple[int, ...] = ()
    layers: int = 2
    page_size: int = 8
    q_heads: int = 4
    kv_heads: int = 2
    algorithm: BaseSparseAlgorithm = field(default_factory=Quest)
    adapter: TorchAdapter = field(default_factory=TorchAdapter)

    def __post_init__(self) -> None:
        self.spec = spec = KVSpec(
            num_layers=self.layers,
            num_q_heads=self.q_heads,
            num_kv_heads=self.kv_heads,
            head_dim=16,
            v_head_dim=16,
            dtype=torch.float32,
            page_size=self.page_size,
        )
        heads = spec.selection_heads(self.scope)
        min_pages, max_pages = self.device_buffer // self.page_size, self.max_row // self.page_size
        pool = self.device_pages or self.num_slots * heads * max_pages
        host = HostKVPool(spec, self.host_pages, self.layout, pin=False)
        device = DeviceBuffer(
            spec,
            heads=heads,
            num_slots=self.num_slots,
            num_pages=pool + self.num_slots * heads,
            max_row_pages=max_pages,
            device=torch.device("cpu"),
        )
        # What nobody wrote must not be read: NaN shows it.
        for layer in range(self.layers):
            for pages in (*host.layer(layer), *device.layer(layer)):
                pages.fill_(torch.nan)
        planner = CapacityPlanner(
            total_pages=pool,
            rows_per_request=heads,
            min_pages=min_pages,
            max_pages=max_pages,
            max_requests=self.num_slots - 1,
        )
        self.manager = SparseKVCacheManager(
            host,
            device,
            planner,
            staging_pages=self.staging_pages,
            counters=CacheCounters(self.page_size, device.page_bytes, torch.device("cpu")),
            checked=True,
        )
        self.policy = SelectionPolicy(
            kv=spec,
            scope=self.scope,
            max_pages=self.budget // self.page_size - 1,
            num_sink_pages=1,
            num_recent_pages=1,
            scale=SCALE,
        )
        self.representations = {
            name: torch.full((self.layers, self.host_pages, *r.shape), torch.nan, dtype=r.dtype)
            for name, r in self.algorithm.representations(spec).items()
        }
        self.coordinator = SparseCoordinator(
            self.policy,
            self.algorithm,
            self.manager,
            self.adapter,
            self.representations,
            min_sparse_context=self.min_sparse_context,
            dense_layers=frozenset(self.dense_layers),
        )
        self.free_host_pages = list(range(self.host_pages - 1, 0, -1))

    def request(
        self, slot: int, length: int, seed: int, *, like: Request | None = None, shared: int = 0
    ) -> Request:
        """Admit a request; its first ``shared`` tokens (whole pages) are those of ``like``."""
        rng = torch.Generator().manual_seed(seed)
        spec = self.spec

        def noise(heads: int) -> Tensor:
            return torch.randn(spec.num_layers, length, heads, spec.head_dim, generator=rng)

        new = Request(
            slot, noise(spec.num_q_heads), noise(spec.num_kv_heads), noise(spec.num_kv_heads), []
        )
        if like is not None:
            for mine, other in ((new.q, like.q), (new.k, like.k), (new.v, like.v)):
                mine[:, :shared] = other[:, :shared]
            new.host_pages = like.host_pages[: shared // self.page_size]
            new.done = shared
        self.coordinator.on_request_begin(slot)
        return new

    def end(self, request: Request) -> None:
        self.coordinator.on_request_end(request.slot)

    def _grow(self, request: Request, length: int) -> Tensor:
        while len(request.host_pages) * self.page_size < length:
            request.host_pages.append(self.free_host_pages.pop())
        return torch.tensor(request.host_pages, dtype=torch.int32)

    def _slots(self, request: Request, start: int, stop: int) -> Tensor:
        pages = torch.tensor(request.host_pages)
        position = torch.arange(start, stop)
        return pages[position // self.page_size] * self.page_size + position % self.page_size

    def prefill(self, *parts: tuple[Request, int]) -> list[Tensor]:
        """Compute the next ``n`` tokens of each request; ``[L, n, Hq, D]`` for each."""
        chunks, slots, offset = [], [], 0
        for request, n in parts:
            start = request.done
            pages = self._grow(request, start + n)
            chunks.append(
                PrefillChunk(
                    slot=request.slot, start=start, length=n, offset=offset, host_pages=pages
                )
            )
            slots.append(self._slots(request, start, start + n))
            offset += n
            request.done += n
        batch = PrefillBatch(chunks=chunks, host_slots=torch.cat(slots))
        self.coordinator.forward_begin(batch)
        outs = []
        for layer in range(self.layers):
            q, k, v = (
                torch.cat(
                    [
                        getattr(r, x)[layer, c.start : c.end]
                        for (r, _), c in zip(parts, chunks, strict=True)
                    ]
                )
                for x in "qkv"
            )
            outs.append(self.coordinator.attention(layer, q, k, v))
        self.coordinator.forward_end()
        out = torch.stack(outs)
        return [out[:, c.offset : c.offset + c.length] for c in chunks]

    def decode(self, *requests: Request) -> Tensor:
        """One step of each request; ``[L, B, Hq, D]``."""
        for r in requests:
            self._grow(r, r.done + 1)
            r.done += 1
        lens = [r.done for r in requests]
        width = max(len(r.host_pages) for r in requests)
        table = torch.zeros(len(requests), width, dtype=torch.int32)
        for row, r in enumerate(requests):
            table[row, : len(r.host_pages)] = torch.tensor(r.host_pages)
        batch = DecodeBatch(
            slots=torch.tensor([r.slot for r in requests]),
            slots_cpu=np.array([r.slot for r in requests]),
            seq_lens=torch.tensor(lens),
            seq_lens_cpu=np.array(lens),
            host_slots=torch.cat([self._slots(r, r.done - 1, r.done) for r in requests]),
            host_page_table=table,
        )
        self.coordinator.forward_begin(batch)
        outs = []
        for layer in range(self.layers):
            q, k, v = (
                torch.stack([getattr(r, x)[layer, r.done - 1] for r in requests]) for x in "qkv"
            )
            outs.append(self.coordinator.attention(layer, q, k, v))
        self.coordinator.forward_end()
        return torch.stack(outs)

    def dense(self, request: Request, start: int, stop: int) -> Tensor:
        """Causal attention in float64 of positions ``start`` to ``stop - 1``, ``[L, n, Hq, D]``."""
        group = self.spec.group_size
        q = request.q[:, start:stop].double()
        k = request.k[:, :stop].double().repeat_interleave(group, dim=2)
        v = request.v[:, :stop].double().repeat_interleave(group, dim=2)
        logits = torch.einsum("lqhd,lkhd->lhqk", q, k) * SCALE
        hidden = torch.arange(stop) > torch.arange(start, stop)[:, None]
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("lhqk,lkhd->lqhd", weights, v)
