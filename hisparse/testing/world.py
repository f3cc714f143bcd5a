"""A small engine for tests: the real manager, coordinator and adapter on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hisparse.adapters import BackendAdapter, TorchAdapter
from hisparse.algorithms import BaseSparseAlgorithm, Representation, build_algorithm
from hisparse.cache import HostKVPool
from hisparse.cache.streams import SideStreams
from hisparse.config import HiSparseConfig
from hisparse.engine.build import PoolSizes, build, kept_tensors, make_policy
from hisparse.engine.capabilities import resolve_settings
from hisparse.types import HostLayout, KVSpec, SelectionScope

#: Di of a simulated model's indexer: DeepSeek-V3.2's.
INDEXER_DIM = 128


@dataclass
class World:
    """Configuration of the engine; sizes are in tokens unless the name says pages.

    Attributes:
        scope: selection scope.
        layout: layout of host memory.
        budget: tokens attended per step and row.
        device_buffer: smallest capacity of a row.
        max_row: largest capacity of a row.
        device_pages: device pages of each layer, tail pages not counted; None: enough for all rows.
        num_slots: request slots, including slot 0 of the padding.
        host_pages: host pages, including page 0 of the padding.
        staging_pages: pages of a staging tile.
        min_sparse_context: contexts up to this length are dense.
        dense_layers: layers that are always dense.
        reuse_layers: number of consecutive layers that share a selection.
        extensions: options of the enabled extensions, by name.
        layers, page_size, q_heads, kv_heads, head_dim: shapes of the model.
        kv_cache_dtype: how K and V are stored.
        latent_rank: width of values that are the first columns of the keys; 0: separate values.
        num_sink_pages, num_recent_pages: pages that are always selected.
        scale: softmax scale.
        logit_cap: cap on attention logits; 0: none.
        windows: tokens that each layer attends; 0: all of them. Empty: 0 in all layers.
        algorithm: selects pages.
        adapter: attends.
        checked: whether the cache manager verifies every selection and every resident byte.
        layer_metrics: whether hits and misses of each layer are counted.
        side_streams: side streams for transfers; None: transfers do not overlap.
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
    extensions: Mapping[str, Any] = field(default_factory=dict)
    layers: int = 2
    page_size: int = 8
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    kv_cache_dtype: str = "auto"
    latent_rank: int = 0
    num_sink_pages: int = 1
    num_recent_pages: int = 1
    scale: float = 0.3
    logit_cap: float = 0.0
    windows: tuple[int, ...] = ()
    algorithm: BaseSparseAlgorithm = field(
        default_factory=lambda: build_algorithm(HiSparseConfig())
    )
    adapter: BackendAdapter = field(default_factory=TorchAdapter)
    checked: bool = True
    layer_metrics: bool = False
    side_streams: SideStreams | None = None

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
            kv_cache_dtype=self.kv_cache_dtype,
            logit_cap=self.logit_cap,
            windows=self.windows,
        )
        self.config = HiSparseConfig(
            budget=self.budget,
            device_buffer_size=self.device_buffer,
            page_size=self.page_size,
            num_sink_pages=self.num_sink_pages,
            num_recent_pages=self.num_recent_pages,
            min_sparse_context=self.min_sparse_context,
            dense_layers=self.dense_layers,
            reuse_layers=self.reuse_layers,
            overlap=self.side_streams is not None,
            checked=self.checked,
            layer_metrics=self.layer_metrics,
            extensions=self.extensions,
        )
        self.policy = make_policy(self.config, self.algorithm, self.spec, self.scale, self.scope)
        self.resolved = resolve_settings(self.config, self.spec, self.scope)
        self.coordinator = build(
            self.resolved,
            self.algorithm,
            self.policy,
            self.adapter,
            host=HostKVPool(self.spec, self.host_pages, self.layout, pin=False),
            sizes=self._sizes(),
            device=torch.device("cpu"),
            streams=self.side_streams,
        )
        self.manager = self.coordinator.manager
        self.representations = self.coordinator.representations
        self._poison(kept_tensors(self.config, self.algorithm, self.policy))
        self.free_host_pages = list(range(self.host_pages - 1, 0, -1))

    def _sizes(self) -> PoolSizes:
        max_pages = self.max_row // self.page_size
        rows = self.num_slots * self.policy.heads
        return PoolSizes(
            num_slots=self.num_slots,
            max_requests=self.num_slots - 1,
            device_pages=(self.device_pages or rows * max_pages) + rows,
            min_row_pages=self.device_buffer // self.page_size,
            max_row_pages=max_pages,
            context_pages=self.host_pages,
            staging_pages=self.staging_pages,
        )

    def _poison(self, kinds: dict[str, Representation]) -> None:
        """Fill unwritten memory with NaN or random numbers, so that tests detect a read of it."""
        for layer in range(self.layers):
            pools = (self.manager.host.stored(layer), self.manager.device.stored(layer))
            for pages in (tensor for pool in pools for tensor in pool.tensors):
                if pages.dtype.is_floating_point:
                    pages.fill_(torch.nan)
                else:
                    # A scale of 255 decodes to infinity.
                    pages.fill_(torch.iinfo(pages.dtype).max)
        for name, kind in kinds.items():
            tensor = self.representations.tensors[name]
            if kind.per == "page" and kind.dtype.is_floating_point:
                tensor.fill_(torch.nan)
            elif kind.per == "page":
                tensor.random_(generator=torch.Generator().manual_seed(0))
