"""A small device and host for tests: the real manager, coordinator and adapter on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from hisparse.adapters import BackendAdapter, TorchAdapter
from hisparse.algorithms import BaseSparseAlgorithm, Quest, Representation
from hisparse.cache import DeviceBuffer, HostKVPool, Overlap, SparseKVCacheManager
from hisparse.cache.capacity import CapacityPlanner
from hisparse.cache.counters import CacheCounters
from hisparse.cache.streams import SideStreams
from hisparse.engine.build import page_limits
from hisparse.engine.coordinator import SparseCoordinator
from hisparse.engine.representations import Representations, list_representations
from hisparse.engine.step import SelectionPolicy
from hisparse.types import HostLayout, KVSpec, SelectionScope

__all__ = ["INDEXER_DIM", "World"]

#: Di of a simulated model's indexer: DeepSeek-V3.2's.
INDEXER_DIM = 128


@dataclass
class World:
    """What is simulated; sizes are tokens where the name does not say pages.

    Attributes:
        scope: selection scope.
        layout: of host memory.
        budget: attended per step and row.
        device_buffer: device pages that each row has at least.
        max_row: device pages that a row may grow to.
        device_pages: device pages of each layer beside the tail pages; None: enough.
        num_slots: request slots; slot 0 is that of padding.
        host_pages: host pages; page 0 is that of padding.
        staging_pages: pages that a prefix is streamed through at a time.
        min_sparse_context: contexts up to so many tokens are dense.
        dense_layers: layers that are always dense.
        reuse_layers: layers that share a selection.
        tail_estimate: whether pages that are not selected are estimated by their means.
        speculate: whose query selects ahead; None: nobody's.
        speculate_above: likeness to that query above which its selection is kept.
        layers, page_size, q_heads, kv_heads, head_dim: of the model.
        fp8: whether K and V are stored in eight bits.
        latent_rank: width of the values, the first columns of the keys; 0: values of their own.
        num_sink_pages, num_recent_pages: always selected.
        scale: softmax scale.
        algorithm: what selects.
        adapter: what attends.
        checked: whether the cache manager verifies every selection and every resident byte.
        side_streams: what transfers run on; None: nothing overlaps.
        split: whether attention is split by what has to be waited for.
    """

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
    reuse_layers: int = 1
    tail_estimate: bool = False
    speculate: Literal["step", "layer"] | None = None
    speculate_above: float = 0.0
    layers: int = 2
    page_size: int = 8
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    fp8: bool = False
    latent_rank: int = 0
    num_sink_pages: int = 1
    num_recent_pages: int = 1
    scale: float = 0.3
    algorithm: BaseSparseAlgorithm = field(default_factory=Quest)
    adapter: BackendAdapter = field(default_factory=TorchAdapter)
    checked: bool = True
    side_streams: SideStreams | None = None
    split: bool = False

    def __post_init__(self) -> None:
        self.spec = KVSpec(
            num_layers=self.layers,
            num_q_heads=self.q_heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.latent_rank or self.head_dim,
            dtype=torch.float32,
            page_size=self.page_size,
            latent=self.latent_rank > 0,
            index_head_dim=INDEXER_DIM,
            fp8=self.fp8,
        )
        budget_pages, max_pages = page_limits(
            self.algorithm,
            self.page_size,
            budget=self.budget,
            device_buffer_size=self.device_buffer,
        )
        self.policy = SelectionPolicy(
            kv=self.spec,
            scope=self.scope,
            budget_pages=budget_pages,
            max_pages=max_pages,
            num_sink_pages=self.num_sink_pages,
            num_recent_pages=self.num_recent_pages,
            scale=self.scale,
        )
        self.manager = self._make_manager()
        kinds = list_representations(
            self.algorithm,
            self.policy,
            tail_estimate=self.tail_estimate,
            speculate=self.speculate == "step",
        )
        self.representations = Representations(
            kinds,
            num_layers=self.layers,
            host_pages=self.host_pages,
            num_slots=self.num_slots,
            device=torch.device("cpu"),
        )
        self.coordinator = SparseCoordinator(
            self.policy,
            self.algorithm,
            self.manager,
            self.adapter,
            self.representations,
            min_sparse_context=self.min_sparse_context,
            dense_layers=frozenset(self.dense_layers),
            reuse_layers=self.reuse_layers,
            tail_estimate=self.tail_estimate,
            speculate=self.speculate,
            speculation_threshold=self.speculate_above,
        )
        self._poison(kinds)
        self.free_host_pages = list(range(self.host_pages - 1, 0, -1))

    def _poison(self, kinds: dict[str, Representation]) -> None:
        """What a page held before it was written may not be read: NaN, or any number, shows it."""
        for name, kind in kinds.items():
            tensor = self.representations.tensors[name]
            if kind.per == "page" and kind.dtype.is_floating_point:
                tensor.fill_(torch.nan)
            elif kind.per == "page":
                tensor.random_(generator=torch.Generator().manual_seed(0))

    def _overlap(self) -> Overlap | None:
        if self.side_streams is None:
            return None
        return Overlap(self.side_streams, self.policy.max_pages if self.split else None)

    def _make_manager(self) -> SparseKVCacheManager:
        heads, size = self.policy.heads, self.page_size
        min_pages, max_pages = self.device_buffer // size, self.max_row // size
        pool = self.device_pages or self.num_slots * heads * max_pages
        host = HostKVPool(self.spec, self.host_pages, self.layout, pin=False)
        device = DeviceBuffer(
            self.spec,
            heads=heads,
            num_slots=self.num_slots,
            num_pages=pool + self.num_slots * heads,
            max_row_pages=max_pages,
            device=torch.device("cpu"),
        )
        for layer in range(self.layers):
            for pages in (*host.stored(layer).tensors, *device.stored(layer).tensors):
                # As a scale: infinite.
                pages.fill_(torch.nan if pages.dtype.is_floating_point else 255)
        planner = CapacityPlanner(
            total_pages=pool,
            rows_per_request=heads,
            min_pages=min_pages,
            max_pages=max_pages,
            max_requests=self.num_slots - 1,
        )
        return SparseKVCacheManager(
            host,
            device,
            planner,
            staging_pages=self.staging_pages,
            counters=CacheCounters(size, device.page_bytes, torch.device("cpu")),
            checked=self.checked,
            overlap=self._overlap(),
        )
