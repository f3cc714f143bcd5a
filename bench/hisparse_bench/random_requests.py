"""Requests with random keys and values, decoded through the coordinator that serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hisparse.adapters import TorchAdapter
from hisparse.algorithms import BaseSparseAlgorithm, DecodeStep, entry_bytes
from hisparse.cache import HostKVPool, PoolSizes
from hisparse.cache.allocate import zeros
from hisparse.cache.counters import CacheStats
from hisparse.cache.formats import format_of
from hisparse.cache.streams import SideStream
from hisparse.config import HiSparseConfig
from hisparse.engine.batches import DecodeBatch
from hisparse.engine.build import build, choose_selection
from hisparse.engine.capabilities import check_capabilities, resolve_miss, resolve_settings
from hisparse.engine.prefill import PrefillChunk
from hisparse.types import IndexerInputs, KVSpec, PagedKV, Selection, SelectionScope

Miss = Literal["transfer", "host", "auto"]

#: Tokens whose representations are built at once: K and V of a whole context may not fit twice.
_CHUNK = 4096
#: Heads of DeepSeek-V3.2's indexer.
_INDEX_HEADS = 64
#: Bytes of random numbers that are drawn at once.
_FILL_BYTES = 64 << 20


@dataclass(kw_only=True)
class RandomRequests:
    """B requests of equal length with host pages scattered over the pool.

    Attributes:
        kv: shapes of the model.
        batch: B.
        context: tokens of each request before the first step, a multiple of the page size.
        budget: tokens attended per step and row.
        row_tokens: capacity of a row's device pages, tokens.
        max_new_tokens: tokens that each request can decode.
        device: device of the device pages.
        algorithm: name of the algorithm.
        seed: seed of keys and values.
        scope: selection scope; None: the algorithm's best.
        miss: the setting.
        aside: replaces the device's own side stream.
    """

    kv: KVSpec
    batch: int
    context: int
    budget: int
    row_tokens: int
    max_new_tokens: int
    device: torch.device
    algorithm: str = HiSparseConfig.algorithm
    seed: int = 0
    scope: SelectionScope | None = None
    miss: Miss = "transfer"
    aside: SideStream | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self._generator = torch.Generator(self.device).manual_seed(self.seed)
        kv, size = self.kv, self.kv.page_size
        pages = -(-(self.context + self.max_new_tokens) // size)
        config = HiSparseConfig(
            algorithm=self.algorithm,
            budget=self.budget,
            device_buffer_size=self.row_tokens,
            page_size=size,
            miss=self.miss,
            selection_scope=self.scope,
            # A model with an indexer attends only what it selects.
            num_sink_pages=0 if kv.index_head_dim else HiSparseConfig.num_sink_pages,
            num_recent_pages=0 if kv.index_head_dim else HiSparseConfig.num_recent_pages,
        )
        config = resolve_miss(config, kv, self.device.type)
        algorithm = self._make_algorithm(config)
        pin = self.device.type == "cuda"
        self.host = HostKVPool(kv, self.batch * pages + 1, "page_head", pin=pin)
        for layer in range(kv.num_layers):
            for pool in self.host.format.split(self.host.stored(layer)):
                self._fill(pool)
        order = torch.randperm(self.batch * pages) + 1
        self.table = order.int().view(self.batch, pages).to(self.device)
        self.adapter = TorchAdapter()
        self.coordinator = build(
            resolve_settings(config, self.kv, self.policy.scope),
            algorithm,
            self.policy,
            self.adapter,
            host=self.host,
            sizes=self._sizes(),
            device=self.device,
            aside=self.aside,
        )
        self.representations = self.coordinator.representations
        self.length = self.context
        self._begin_requests()
        for slot in range(1, self.batch + 1):
            for layer in range(kv.num_layers):
                self._build_representations(slot, layer)

    def _fill(self, pool: Tensor) -> None:
        """Fill a pool with random numbers in blocks, for a copy of the whole pool may not fit."""
        pages = max(1, _FILL_BYTES // (4 * pool[0].numel()))
        for part in pool.split(pages):
            if self.device.type == "cpu":
                part.normal_()
            else:  # A GPU draws them faster than the processor by far.
                part.copy_(torch.randn(part.shape, dtype=pool.dtype, device=self.device))

    def _make_algorithm(self, config: HiSparseConfig) -> BaseSparseAlgorithm:
        """The algorithm, if the model and the device allow it."""
        check_capabilities(config, self.device.type)
        scale = self.kv.head_dim**-0.5
        algorithm, self.policy, _ = choose_selection(config, self.kv, scale, self.device.type)
        # What a layer reads of a page to score it.
        self._scored_page_bytes = entry_bytes(algorithm.representations(self.policy), "page")
        if algorithm.reads_host_keys:
            key = format_of(self.kv).parts[0]
            tokens = self.kv.page_size * self.kv.num_kv_heads
            self._scored_page_bytes += tokens * key.width * key.dtype.itemsize
        return algorithm

    def observe(self, layer: int, q: Tensor, step: DecodeStep, selection: Selection) -> None:
        """Keep the last selection for :meth:`attend`; see :meth:`SparseCoordinator.observe`."""
        self._selection = selection

    def _build_representations(self, slot: int, layer: int) -> None:
        """Build a request's representations from its keys and values, without queries."""
        size = self.kv.page_size
        longest = max(1, _CHUNK // size) * size
        for start in range(0, self.context, longest):
            end = min(start + longest, self.context)
            pages = self.table[slot - 1, : end // size]
            index = pages[start // size :].cpu().long()
            k, v = (
                pool[index].transpose(1, 2).flatten(0, 1).to(self.device)
                for pool in self.host.layer(layer)
            )
            chunk = PrefillChunk(
                slot=slot,
                start=start,
                length=end - start,
                offset=0,
                host_pages=pages,
                is_last=end == self.context,
            )
            indexer = self.indexer_inputs(len(k)) if self.kv.index_head_dim else None
            self.coordinator.prefill.build_representations(layer, chunk, k, v, indexer)

    def _sizes(self) -> PoolSizes:
        rows, row_pages = self.policy.heads, self.row_tokens // self.kv.page_size
        return PoolSizes(
            num_slots=self.batch + 1,
            device_pages=self.batch * rows * row_pages + (self.batch + 1) * rows,
            min_row_pages=row_pages,
            max_row_pages=row_pages,
            context_pages=self.table.shape[1],
            staging_pages=1,
        )

    def _begin_requests(self) -> None:
        """Place the most recent pages on the device, as a prefill does."""
        size, manager = self.kv.page_size, self.coordinator.manager
        # Slot 0 is for padding.
        slots = np.arange(1, self.batch + 1)
        for slot in slots:
            self.coordinator.on_request_begin(int(slot))
        pages = self.context // size
        manager.start_forward(slots, np.full(self.batch, pages))
        oldest = max(0, pages - self.row_tokens // size)
        for layer in range(self.kv.num_layers):
            for slot in slots:
                host, table = self.host.stored(layer), self.table[slot - 1, :pages]
                manager.loader.place(layer, int(slot), oldest, pages, host, table)

    def drop_resident(self) -> None:
        """Forget the device pages of all requests, but the tail's, in the next forward."""
        for slot in range(1, self.batch + 1):
            self.coordinator.manager.residency.begin(slot)

    def begin_token(self) -> None:
        """Start a forward of one new token for each request."""
        self.coordinator.forward_begin(self.next_batch())

    def next_batch(self) -> DecodeBatch:
        """A decode batch of one new token for each request."""
        self.length += 1
        position = self.length - 1
        slots = torch.arange(1, self.batch + 1)
        lens = torch.full((self.batch,), self.length)
        page = self.table[:, position // self.kv.page_size].long()
        return DecodeBatch(
            slots=slots.to(self.device),
            slots_cpu=slots.numpy(),
            seq_lens=lens.to(self.device),
            seq_lens_cpu=np.asarray(lens),
            host_slots=page * self.kv.page_size + position % self.kv.page_size,
            host_page_table=self.table[:, : position // self.kv.page_size + 1],
        )

    def new_token(self) -> tuple[Tensor, Tensor]:
        """Random K and V of the new tokens, ``[B, Hkv, D]``."""
        shape = (self.batch, self.kv.num_kv_heads, self.kv.head_dim)
        k = self._stored(*shape)
        return k, self.host.format.values_of(k, self._stored(*shape))

    def indexer_inputs(self, tokens: int) -> IndexerInputs:
        """Random outputs of the model's indexer for some tokens; each of its heads weighs 1."""
        width = self.kv.index_head_dim
        queries = self._stored(tokens, _INDEX_HEADS, width)
        return IndexerInputs(queries, self._stored(tokens, width), torch.ones_like(queries[..., 0]))

    def _stored(self, *shape: int) -> Tensor:
        return self.random(*shape).to(self.kv.dtype)

    def random(self, *shape: int) -> Tensor:
        """Random numbers in float32, the same for other requests of the same seed."""
        return torch.randn(shape, device=self.device, generator=self._generator)

    @property
    def stats(self) -> CacheStats:
        """Counters of the cache since the start; ends a forward that has begun."""
        self.coordinator.forward_end()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return self.coordinator.stats()

    def read_bytes(self, stats: CacheStats) -> int:
        """Bytes that decode steps with these counts read.

        For a selection, what the algorithm scores of every page of the context; the K and V that
        are attended; and, once more, the pages that are copied from host memory.
        """
        size, page_bytes = self.kv.page_size, self.page_bytes
        scored = stats.selections * (self.context // size) * self._scored_page_bytes
        attended = stats.selected_tokens * page_bytes // size
        copied = stats.decode_read_bytes - stats.away_pages * page_bytes
        return scored // self.policy.heads + attended + copied

    @property
    def page_bytes(self) -> int:
        """Bytes of a device page: K and V of one row's heads."""
        return self.coordinator.manager.device.page_bytes

    @property
    def context_bytes(self) -> int:
        """Bytes of the K and V of all contexts in one layer."""
        return self.batch * self.context * self.host.format.layer_token_bytes

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Float64 attention of ``query [B, Hq, D]`` over the observed selection and the tail page.

        An algorithm that ranks the tail page attends it if the selection leaves a place for it.
        """
        kv, size = self.kv, self.kv.page_size
        pages, _ = self._selection
        out = torch.empty(*query.shape[:2], kv.v_head_dim, dtype=torch.float64)
        group = kv.num_q_heads // self.policy.heads
        # Query heads that share both the selection and the KV head.
        together = min(group, kv.group_size)
        tail = (self.length - 1) // size
        for b in range(self.batch):
            for first in range(0, kv.num_q_heads, together):
                selected = pages[b, first // group]
                attended = selected[selected >= 0].tolist()
                tokens = len(attended) * size
                below = self.policy.tail_below
                if below is None or len(attended) < below or self.length % size:
                    attended.append(tail)
                    tokens += self.length - tail * size
                index = self.table[b, attended].long().cpu()
                k, v = (
                    pool[index, first // kv.group_size].flatten(0, 1)[:tokens].double()
                    for pool in self.host.layer(layer)
                )
                heads = slice(first, first + together)
                logits = query[b, heads].double().cpu() @ k.T * self.policy.scale
                out[b, heads] = logits.softmax(-1) @ v
        return out

    def contiguous(self, layer: int) -> PagedKV:
        """K and V of the contexts, without decoded tokens, ``[B, Hkv, S, D]`` on the device.

        They are in the same kind of memory as hisparse's pages.
        """
        index = self.table[:, : self.context // self.kv.page_size].cpu().long()

        def gather(pool: Tensor) -> Tensor:
            found = pool[index].transpose(1, 2).flatten(2, 3)
            return zeros(found.shape, found.dtype, self.device).copy_(found)

        form = self.host.format
        return form.join([gather(x) for x in form.split(self.host.stored(layer))]).kv
