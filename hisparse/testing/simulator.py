"""A server without a model: serves requests with random K and V by the real coordinator.

Tests compare the outputs with float64 attention over the positions that should be attended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hisparse.adapters import BackendAdapter, TorchAdapter
from hisparse.algorithms import BaseSparseAlgorithm, Representation, build_algorithm
from hisparse.cache import HostKVPool, PoolSizes
from hisparse.cache.streams import SideStream
from hisparse.config import HiSparseConfig
from hisparse.engine.batches import DecodeBatch, MixedBatch, PrefillBatch
from hisparse.engine.build import build, kept_tensors, make_policy
from hisparse.engine.capabilities import resolve_settings
from hisparse.engine.prefill import PrefillChunk
from hisparse.types import BlockIndexerInputs, HostLayout, IndexerInputs, KVSpec, SelectionScope

#: Di of a simulated model's indexer: DeepSeek-V3.2's. Hi is another number.
INDEXER_DIM = 128
_INDEXER_HEADS = 3


@dataclass
class Request:
    """A request with all of its tokens generated in advance.

    Attributes:
        slot: request slot.
        q: ``[L, n, Hq, D]``, model's dtype, queries of all n positions.
        k, v: ``[L, n, Hkv, D]``, model's dtype.
        indexer: indexer inputs of all positions, ``[L, n, ...]``, model's dtype.
        host_pages: host page of each page so far.
        prompt: tokens of the prompt; None: every prefill ends the prompt.
        done: tokens computed so far.
    """

    slot: int
    q: Tensor
    k: Tensor
    v: Tensor
    indexer: IndexerInputs
    host_pages: list[int]
    prompt: int | None = None
    done: int = 0

    @property
    def length(self) -> int:
        """Number of tokens, n."""
        return self.k.shape[1]

    @property
    def streams(self) -> tuple[Tensor, ...]:
        """All tensors with a token dimension, ``[L, n, ...]`` each, model's dtype."""
        return (self.q, self.k, self.v, *self.indexer)


@dataclass
class Simulator:
    """Plays the role of the framework: allocates host pages and slots, builds batches.

    It has the real manager, coordinator and adapter, on a CPU. Sizes are in tokens unless the name
    says pages.

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
        layers, page_size, q_heads, kv_heads, head_dim, dtype: shapes and dtype of the model.
        kv_cache_dtype: how K and V are stored.
        latent_rank: width of values that are the first columns of the keys; 0: separate values.
        num_sink_pages, num_recent_pages: pages that are always selected.
        scale: softmax scale.
        logit_cap: cap on attention logits; 0: none.
        windows: tokens that each layer attends; 0: all of them. Empty: 0 in all layers.
        unindexed: see :class:`KVSpec`.
        algorithm: selects pages.
        adapter: attends.
        checked: whether the cache manager verifies every selection and every resident byte.
        aside: see :class:`SparseKVCacheManager`.
        miss: the setting.
        sinks: ``[L, Hq]``, any float dtype, logits of attention sinks; None: the model has none.
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
    dtype: torch.dtype = torch.float32
    kv_cache_dtype: str = "auto"
    latent_rank: int = 0
    num_sink_pages: int = 1
    num_recent_pages: int = 1
    scale: float = 0.3
    logit_cap: float = 0.0
    windows: tuple[int, ...] = ()
    unindexed: tuple[int, ...] = ()
    algorithm: BaseSparseAlgorithm = field(
        default_factory=lambda: build_algorithm(HiSparseConfig())
    )
    adapter: BackendAdapter = field(default_factory=TorchAdapter)
    checked: bool = True
    aside: SideStream | None = None
    miss: Literal["transfer", "host", "auto"] = "transfer"
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        self.spec = KVSpec(
            num_layers=self.layers,
            num_q_heads=self.q_heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.latent_rank or self.head_dim,
            dtype=self.dtype,
            page_size=self.page_size,
            attention="MLA" if self.latent_rank else "GQA",
            index_head_dim=INDEXER_DIM,
            kv_cache_dtype=self.kv_cache_dtype,
            logit_cap=self.logit_cap,
            windows=self.windows,
            unindexed=self.unindexed,
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
            miss=self.miss,
            checked=self.checked,
            extensions=self.extensions,
        )
        self.policy = make_policy(
            self.config, self.algorithm, self.spec, self.scale, self.scope, "cpu"
        )
        self.resolved = resolve_settings(self.config, self.spec, self.scope)
        self.coordinator = build(
            self.resolved,
            self.algorithm,
            self.policy,
            self.adapter,
            host=HostKVPool(self.spec, self.host_pages, self.layout, pin=False),
            sizes=self._sizes(),
            device=torch.device("cpu"),
            aside=self.aside,
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

    def request(
        self,
        slot: int,
        length: int,
        seed: int,
        *,
        like: Request | None = None,
        shared: int = 0,
        prompt: int | None = None,
    ) -> Request:
        """Admit a request; it shares its first ``shared`` tokens (whole pages) with ``like``."""
        rng, spec = torch.Generator().manual_seed(seed), self.spec

        def noise(*shape: int) -> Tensor:
            return torch.randn(spec.num_layers, length, *shape, generator=rng).to(spec.dtype)

        q = noise(spec.num_q_heads, spec.head_dim)
        k, v = (noise(spec.num_kv_heads, spec.head_dim) for _ in "kv")
        v = self.manager.host.format.values_of(k, v)
        heads, dim = _INDEXER_HEADS * spec.num_kv_heads, INDEXER_DIM
        indexer = IndexerInputs(noise(heads, dim), noise(dim), noise(heads))
        new = Request(slot, q, k, v, indexer, [], prompt)
        if like is not None:
            for target, source in zip(new.streams, like.streams, strict=True):
                target[:, :shared] = source[:, :shared]
            new.host_pages = like.host_pages[: shared // self.page_size]
            new.done = shared
        self.coordinator.on_request_begin(slot)
        return new

    def end(self, request: Request, *, free: bool = False) -> None:
        """End a request; with ``free``, the next allocation reuses its host pages."""
        self.coordinator.on_request_end(request.slot)
        if free:
            self.free_host_pages += request.host_pages[::-1]

    def _grow(self, request: Request, length: int) -> Tensor:
        while len(request.host_pages) * self.page_size < length:
            request.host_pages.append(self.free_host_pages.pop())
        return torch.tensor(request.host_pages, dtype=torch.int32)

    def _slots(self, request: Request, start: int, stop: int) -> Tensor:
        pages = torch.tensor(request.host_pages)
        position = torch.arange(start, stop)
        return pages[position // self.page_size] * self.page_size + position % self.page_size

    def prefill(self, *parts: tuple[Request, int]) -> list[Tensor]:
        """Compute the next ``n`` tokens of each request; returns ``[L, n, Hq, D]`` each."""
        batch = self.next_chunks(*parts)
        self.coordinator.forward_begin(batch)
        return self._of_chunks(batch, self._forward(_spans(parts, batch)))

    def mixed(self, parts: Sequence[tuple[Request, int]], *requests: Request) -> list[Tensor]:
        """Compute chunks and decode other requests in one forward.

        Args:
            parts: requests and the tokens of their chunks.
            requests: those that decode.

        Returns:
            ``[L, n, Hq, D]``, model's dtype, for each chunk, then ``[L, B, Hq, D]`` of the step.
        """
        prefill, decode = self.next_chunks(*parts), self.next_tokens(*requests)
        self.coordinator.forward_begin(MixedBatch(prefill=prefill, decode=decode))
        spans = [*_spans(parts, prefill), *((r, r.done - 1, r.done) for r in requests)]
        out = self._forward(spans)
        return [*self._of_chunks(prefill, out), out[:, prefill.num_tokens :]]

    def next_chunks(self, *parts: tuple[Request, int]) -> PrefillBatch:
        """A batch with the next ``n`` tokens of each request; increases ``done``."""
        chunks, slots, offset = [], [], 0
        for request, n in parts:
            start = request.done
            request.done += n
            chunk = PrefillChunk(
                slot=request.slot,
                start=start,
                length=n,
                offset=offset,
                host_pages=self._grow(request, start + n),
                is_last=request.prompt is None or request.done >= request.prompt,
            )
            chunks.append(chunk)
            slots.append(self._slots(request, start, start + n))
            offset += n
        return PrefillBatch(chunks=chunks, host_slots=torch.cat(slots))

    def _of_chunks(self, batch: PrefillBatch, out: Tensor) -> list[Tensor]:
        """The outputs ``[L, T, Hq, D]`` of each chunk."""
        return [out[:, c.offset : c.offset + c.length] for c in batch.chunks]

    def decode(self, *requests: Request) -> Tensor:
        """Decode one token of each request; returns ``[L, B, Hq, D]``, model's dtype."""
        self.coordinator.forward_begin(self.next_tokens(*requests))
        return self._forward([(r, r.done - 1, r.done) for r in requests])

    def next_tokens(self, *requests: Request) -> DecodeBatch:
        """A batch with the next token of each request; increases ``done``."""
        for r in requests:
            self._grow(r, r.done + 1)
            r.done += 1
        lens = [r.done for r in requests]
        width = max(len(r.host_pages) for r in requests)
        table = torch.zeros(len(requests), width, dtype=torch.int32)
        for row, r in enumerate(requests):
            table[row, : len(r.host_pages)] = torch.tensor(r.host_pages)
        return DecodeBatch(
            slots=torch.tensor([r.slot for r in requests]),
            slots_cpu=np.array([r.slot for r in requests]),
            seq_lens=torch.tensor(lens),
            seq_lens_cpu=np.array(lens),
            host_slots=torch.cat([self._slots(r, r.done - 1, r.done) for r in requests]),
            host_page_table=table,
        )

    def _forward(self, parts: list[tuple[Request, int, int]]) -> Tensor:
        """Run all layers over positions ``start`` to ``stop - 1`` of each request."""
        outs = []
        for layer in range(self.layers):
            streams = zip(*([x[layer, a:b] for x in r.streams] for r, a, b in parts), strict=True)
            q, k, v, *indexer = (torch.cat(tokens) for tokens in streams)
            sinks = None if self.sinks is None else self.sinks[layer]
            inputs = self.indexer_inputs(layer, parts, *indexer)
            outs.append(self.coordinator.attention(layer, q, k, v, inputs, sinks))
        self.coordinator.forward_end()
        return torch.stack(outs)

    def indexer_inputs(
        self, layer: int, parts: Sequence[tuple[Request, int, int]], *tensors: Tensor
    ) -> IndexerInputs:
        """What the model's own indexer gives for positions ``start`` to ``stop - 1`` of requests.

        Args:
            layer: layer number.
            parts: requests, start and stop.
            tensors: ``[T, ...]`` each, of the fields of ``Request.indexer``.
        """
        return simulated_inputs(*tensors)

    def dense(self, request: Request, start: int, stop: int) -> Tensor:
        """Float64 attention of positions ``start`` to ``stop - 1``: ``[L, n, Hq, D]``.

        Causal, within each layer's window, with the model's cap and sinks.
        """
        group = self.spec.group_size
        q = request.q[:, start:stop].double()
        k = request.k[:, :stop].double().repeat_interleave(group, dim=2)
        v = request.v[:, :stop].double().repeat_interleave(group, dim=2)
        logits = torch.einsum("lqhd,lkhd->lhqk", q, k) * self.scale
        if self.logit_cap:
            logits = self.logit_cap * torch.tanh(logits / self.logit_cap)
        behind = torch.arange(start, stop)[:, None] - torch.arange(stop)
        windows = torch.tensor([self.spec.window(x) or stop for x in range(self.layers)])
        hidden = (behind < 0) | (behind >= windows[:, None, None])
        logits = logits.masked_fill(hidden[:, None], -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.double()[..., None, None].expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, sinks], -1)
        weights = logits.softmax(-1)[..., :stop]
        return torch.einsum("lhqk,lkhd->lqhd", weights, v)


def simulated_inputs(*tensors: Tensor) -> BlockIndexerInputs:
    """Inputs of an indexer, ``[T, ...]`` each; a block's key is the mean of its tokens' keys."""
    positions = tensors[1].new_zeros(len(tensors[1]), 3, dtype=torch.int64)
    return BlockIndexerInputs.of(
        IndexerInputs(*tensors), positions, lambda keys, first: keys.float().mean(1)
    )


def _spans(
    parts: Sequence[tuple[Request, int]], batch: PrefillBatch
) -> list[tuple[Request, int, int]]:
    """First and last position, plus one, of each request's chunk."""
    return [(r, c.start, c.end) for (r, _), c in zip(parts, batch.chunks, strict=True)]
