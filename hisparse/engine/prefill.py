"""Prefill of one layer: write through, attend exactly, load the device pages for decoding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hisparse.adapters import Attended, merge_attended
from hisparse.algorithms import PrefillStep
from hisparse.cache import Tile
from hisparse.engine.contract import call, check_positions
from hisparse.engine.extensions.base import Components, Extension, overriding
from hisparse.engine.representations import ignore
from hisparse.types import AttentionRule, IndexerInputs, PagedKV, StoredKV


@dataclass(frozen=True, kw_only=True)
class PrefillChunk:
    """The part of one request's prompt that this forward computes.

    Attributes:
        slot: request slot.
        start: position of the first token; the tokens before it are in host memory.
        length: number of tokens.
        offset: index of the first token in the forward's flat token dimension.
        host_pages: ``[ceil((start + length) / S)] int32``, host page of each page so far.
        is_last: whether the prompt ends here, as far as the framework knows.
    """

    slot: int
    start: int
    length: int
    offset: int
    host_pages: Tensor
    is_last: bool = True

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.length

    @cached_property
    def host_pages_cpu(self) -> Tensor:
        """``host_pages [P] int32`` copied to the host once, for the copy engine."""
        return self.host_pages.cpu()


class Prefill:
    """Runs prefill chunks exactly: densely, unless the model itself was trained sparse.

    Args:
        extensions: in the order of their hooks.
    """

    def __init__(self, components: Components, extensions: Sequence[Extension]) -> None:
        self._components = components
        self._policy = components.policy
        self._manager = components.manager
        by_layer = components.representations.by_layer
        self._construct = by_layer(components.algorithm.construct_representations, ignore)
        self._select = by_layer(components.algorithm.select_prefill, ignore)
        self._storing = by_layer(overriding("store_pages", extensions), (), selecting=False)
        # Keys and values of a prefix and its chunk, one after the other; all layers share them.
        self._joined: dict[str, Tensor] = {}
        #: Layers that attend what the layer before them selected, and that selection of each chunk.
        self._sharing = set(self._policy.kv.unindexed) - components.modes.dense_layers
        self._shared: list[Tensor | None] = []

    def run(
        self,
        chunks: Sequence[PrefillChunk],
        host_slots: Tensor,
        layer_id: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        indexer: IndexerInputs | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """``q [T, Hq, D]``, ``k, v [T, Hkv, D]``, model's dtype -> ``[T, Hq, Dv]``, dtype of q.

        ``sinks [Hq]``, any float dtype: see :meth:`SparseCoordinator.attention`.
        ``host_slots [T] int64``, host slot of each token.
        """
        # Attention and representations use the values that a later read returns, so the output does
        # not depend on which part of a prompt comes from the pool.
        k, v = self._manager.host.format.as_read(k, v)
        self._manager.kv_io.write(layer_id, host_slots, k, v)
        outputs, chosen = [], self._shared if layer_id in self._sharing else []
        self._shared = []
        for number, chunk in enumerate(chunks):
            tokens = slice(chunk.offset, chunk.offset + chunk.length)
            new = q[tokens], k[tokens], v[tokens]
            pages = self._page_aligned(layer_id, chunk, *new[1:])
            inputs = None if indexer is None else indexer.take(tokens)
            step = self.summarize(layer_id, chunk, new[0], pages, inputs)
            if layer_id not in self._sharing:
                positions = call(self._select[layer_id], layer_id, layer_id, step)
                check_positions(positions, self._components.algorithm, layer_id, step)
                chosen.append(positions)
            attended = self._attend(layer_id, chunk, *new, chosen[number])
            outputs.append(merge_attended(attended, sinks=sinks, dtype=q.dtype).out)
            self._place(layer_id, chunk, pages)
        if layer_id + 1 in self._sharing:
            self._shared = chosen
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _page_aligned(self, layer_id: int, chunk: PrefillChunk, k: Tensor, v: Tensor) -> PagedKV:
        """K and V from the start of the chunk's first page on, ``[T', Hkv, D]`` each.

        If the chunk begins within a page, the page's earlier tokens are read from host memory.
        """
        size = self._policy.kv.page_size
        missing = chunk.start % size
        if not missing:
            return PagedKV(k, v)
        page = chunk.host_pages[chunk.start // size].long()
        slots = page * size + torch.arange(missing, device=page.device)
        head_k, head_v = self._manager.kv_io.read_tokens(layer_id, slots)
        return PagedKV(torch.cat([head_k, k]), torch.cat([head_v, v]))

    def summarize(
        self,
        layer_id: int,
        chunk: PrefillChunk,
        q: Tensor,
        pages: PagedKV,
        indexer: IndexerInputs | None = None,
    ) -> PrefillStep:
        """Build the representations of a chunk.

        Args:
            q: ``[T, Hq, D]``, model's dtype; T = 0 for a chunk that is loaded and not computed.
            pages: ``[T', Hkv, D]``, model's dtype, from the start of the chunk's first page on.
            indexer: indexer inputs of the chunk's tokens.

        Returns:
            the algorithm's view of the chunk.
        """
        host_pages, keys, values = self._complete(chunk, pages)
        step = PrefillStep(
            policy=self._policy,
            representations=self._components.representations.tensors,
            slot=chunk.slot,
            start=chunk.start,
            length=chunk.length,
            host_pages=host_pages,
            context_pages=chunk.host_pages,
            is_last=chunk.is_last,
            indexer=indexer,
            context_keys=lambda layer: self._context_keys(layer, chunk),
        )
        call(self._construct[layer_id], layer_id, keys, q, layer_id, step)
        self._store(layer_id, host_pages, keys, values)
        return step

    def build_representations(
        self,
        layer_id: int,
        chunk: PrefillChunk,
        k: Tensor,
        v: Tensor,
        indexer: IndexerInputs | None = None,
    ) -> None:
        """Build representations of a chunk from loaded K and V ``[T, Hkv, D]``, model's dtype.

        Loaded chunks have no queries; only algorithms with a ``query_window`` need them. An
        algorithm that asks the model's indexer needs its outputs for these tokens.
        """
        self._components.representations.apply_resets()
        no_queries = k.new_zeros(0, self._policy.kv.num_q_heads, k.shape[-1])
        self.summarize(layer_id, chunk, no_queries, PagedKV(k, v), indexer)

    def store_extensions(self, layer_id: int, chunk: PrefillChunk, k: Tensor, v: Tensor) -> None:
        """Build only extensions' representations, from ``k, v [T, Hkv, D]``, model's dtype."""
        self._store(layer_id, *self._complete(chunk, PagedKV(k, v)))

    def _complete(self, chunk: PrefillChunk, pages: PagedKV) -> tuple[Tensor, Tensor, Tensor]:
        """Host pages ``[P]`` of a chunk's complete pages, and their K and V ``[P, S, Hkv, D]``."""
        size = self._policy.kv.page_size
        first, last = chunk.start // size, chunk.end // size
        keys, values = (x[: (last - first) * size].unflatten(0, (-1, size)) for x in pages)
        return chunk.host_pages[first:last], keys, values

    def _store(self, layer_id: int, host_pages: Tensor, keys: Tensor, values: Tensor) -> None:
        """Let extensions store pages: ``keys, values [P, S, Hkv, D]``, ``host_pages [P] int32``."""
        for extension in self._storing[layer_id]:
            call(extension.store_pages, layer_id, layer_id, keys, values, host_pages)

    def _prefix(self, layer_id: int, chunk: PrefillChunk) -> list[Tile]:
        """The tiles of a chunk's prefix that the chunk attends; at least one if it has a prefix."""
        if not chunk.start:
            return []
        window, first = self._policy.kv.window(layer_id), 0
        if window:
            first = max(0, chunk.start - max(window - 1, 1)) // self._policy.kv.page_size
        return self._manager.staging.tiles(chunk.host_pages_cpu, chunk.start, first)

    def _context_keys(self, layer_id: int, chunk: PrefillChunk) -> Iterator[tuple[int, Tensor]]:
        """Read all keys ``[t, Hkv, D]`` up to the end of the chunk; see :class:`PrefillStep`."""
        tiles = self._manager.staging.tiles(chunk.host_pages_cpu, chunk.end)
        for position, keys, _ in self._read(layer_id, tiles):
            yield position, keys

    def _read(self, layer_id: int, tiles: Sequence[Tile]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Read tiles: the position of the first token, K and V ``[t, Hkv, D]`` of each."""
        manager = self._manager
        for tile in tiles:
            pages = manager.staging.read(layer_id, tile)
            start = tile.first * self._policy.kv.page_size
            count = tile.end - start
            keys, values = (x.transpose(1, 2).flatten(0, 1)[:count] for x in pages)
            num_bytes = count * manager.host.format.layer_token_bytes
            manager.counters.add("prefill_read_bytes", num_bytes)
            yield start, keys, values

    def _attend(
        self,
        layer_id: int,
        chunk: PrefillChunk,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor | None,
    ) -> Attended:
        """Attention of the chunk over itself and over its prefix, streamed through staging.

        A prefix of one tile and the chunk are attended at once on a CPU. The order of the sums then
        depends only on positions, not on which part of a prompt comes from the pool, so fresh and
        cached runs of a prompt agree in 16 bits too.

        Args:
            q: ``[T, Hq, D]``.
            k, v: ``[T, Hkv, D]``.
            positions: ``[T, K]`` or ``[T, Hkv, K]``, int32, positions that each query attends;
                None: all up to its own, or those in the layer's window.
        """
        rule = self._policy.layer_rules[layer_id]
        tiles = self._prefix(layer_id, chunk)
        prefix = self._read(layer_id, tiles)
        first = chunk.start
        if len(tiles) == 1 and positions is None and q.device.type == "cpu":
            first, keys, values = next(prefix)
            plain = self._manager.host.format.plain
            old, new = plain.split(StoredKV(keys, values)), plain.split(StoredKV(k, v))
            k, v = plain.join([self._join(*x) for x in zip(("k", "v"), old, new, strict=False)]).kv
        if positions is not None:
            positions = positions - chunk.start
        attended = self._attend_keys(q, k, v, rule, first - chunk.start, positions, causal=True)
        for first, keys, values in prefix:
            count, distance = len(q), first - chunk.start
            if rule.window:
                # The windows of later queries begin after the tile.
                count = min(distance + len(keys) + rule.window - 1, count)
            if count:
                part = q[:count], keys, values, rule, distance, positions
                # Not kept: it would stay until that of the next tile is there.
                attended = _merge_first(self._attend_keys(*part), attended)
        return attended

    def _attend_keys(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: AttentionRule,
        first_key: int,
        positions: Tensor | None,
        *,
        causal: bool = False,
    ) -> Attended:
        """Attend over keys whose first one is ``first_key`` tokens after the first query.

        ``q [T, Hq, D]``, ``k, v [t, Hkv, D]``; ``positions`` count from the first query.
        """
        adapter = self._components.adapter
        if positions is not None and positions.ndim == 3:
            parts = q.chunk(k.shape[1], 1), k.split(1, 1), v.split(1, 1), positions.unbind(1)
            heads = [
                self._attend_keys(q, k, v, rule, first_key, own)
                for q, k, v, own in zip(*parts, strict=True)
            ]
            return Attended(*(torch.cat(x, 1) for x in zip(*heads, strict=True)))
        if positions is not None:
            return adapter.attend_chosen(q, k, v, rule, positions - first_key)
        return adapter.attend_prefill(q, k, v, rule, causal=causal, first_key=first_key)

    def _join(self, name: str, prefix: Tensor, chunk: Tensor) -> Tensor:
        """``[t, Hkv, D]`` and ``[T, Hkv, D]`` one after the other, valid until the next call."""
        first, count = len(prefix), len(prefix) + len(chunk)
        buffer = self._joined.get(name)
        if buffer is None or len(buffer) < count:
            # New memory costs more than the copy: it grows in powers of two, and stays.
            shape = (1 << (count - 1).bit_length(), *chunk.shape[1:])
            buffer = self._joined[name] = chunk.new_empty(shape)
        joined = buffer[:count]
        joined[:first] = prefix
        joined[first:] = chunk
        return joined

    def _place(self, layer_id: int, chunk: PrefillChunk, pages: PagedKV) -> None:
        """Write the most recent full pages, and the tail, to the device."""
        manager, size = self._manager, self._policy.kv.page_size
        first, last = chunk.start // size, chunk.end // size
        kept = int(manager.residency.held(np.array(chunk.slot)))
        window = self._policy.kv.window(layer_id)
        if window:
            kept = min(kept, self._policy.kv.window_pages(window))
        oldest = max(0, last - kept)
        from_host = oldest < first and manager.residency.is_cold(chunk.slot)
        if from_host:
            # A row may hold most of a long prefix by now. Decode steps load what they select of it.
            oldest = max(oldest, first - manager.residency.capacities.min_pages)
            placed = (first - oldest) * self._policy.heads
            manager.counters.add("prefill_read_bytes", placed * manager.device.page_bytes)
        k, v = (x[: (last - first) * size].unflatten(0, (-1, size)).transpose(1, 2) for x in pages)
        if from_host:
            host = manager.host.stored(layer_id)
            manager.loader.place(layer_id, chunk.slot, oldest, first, host, chunk.host_pages)
        begin = max(oldest, first)
        if begin < last:
            new = manager.host.format.encode(k, v)
            table = torch.arange(-first, last - first, dtype=torch.int32, device=k.device)
            manager.loader.place(layer_id, chunk.slot, begin, last, new, table)
        tail = chunk.end % size
        if tail:
            manager.kv_io.write_tail(layer_id, chunk.slot, pages.k[-tail:], pages.v[-tail:])


def _merge_first(new: Attended, attended: Attended) -> Attended:
    """Merge attention of the first queries over more keys into that of all queries."""
    count = len(new.lse)
    if count == len(attended.lse):
        return merge_attended(new, attended)
    merged = merge_attended(new, Attended(*(x[:count] for x in attended)))
    both = zip(merged, attended, strict=True)
    return Attended(*(torch.cat([first, rest[count:]]) for first, rest in both))
