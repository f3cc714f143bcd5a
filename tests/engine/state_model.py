"""What the state machine compares the engine with: tokens, a plain dictionary, a prefix cache."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hisparse.cache.formats import format_of
from hisparse.engine.build import kept_tensors
from hisparse.testing import Request, Simulator
from hisparse.testing.simulator import INDEXER_DIM
from hisparse.types import IndexerInputs, KVSpec

__all__ = [
    "Contents",
    "PageOracle",
    "PrefixCache",
    "Sequence",
    "Vocabulary",
    "bytes_of",
    "page_tensors",
    "positions_of",
]

_INDEXER_HEADS = 2


class Vocabulary:
    """K, V and query of every token, by the token's number.

    A token's number, modulo ``TOKENS``, stands for its whole prefix: two requests have the same one
    at a position if they share the prefix up to it. A model computes nearly the same K and V for a
    prefix in every batch. Here two such computations give numbers, and K and V, that differ.

    Attributes:
        q: ``[N, L, Hq, D]``.
        k, v: ``[N, L, Hkv, D]``, as computed.
        read_k, read_v: the same in float64, as a later read returns them.
        stored: the same as bytes, ``[N, L, Hkv, bytes]`` each.
        indexer: outputs of the model's own indexer, ``[N, L, ...]``.
    """

    TOKENS = 1024
    SIZE = 2 * TOKENS

    def __init__(self, spec: KVSpec, *, has_indexer: bool) -> None:
        rng = torch.Generator().manual_seed(7)

        def noise(*shape: int) -> Tensor:
            return torch.randn(self.SIZE, spec.num_layers, *shape, generator=rng)

        self.q = noise(spec.num_q_heads, spec.head_dim)
        self.k = noise(spec.num_kv_heads, spec.head_dim)
        self.v = format_of(spec).values_of(self.k, noise(*self.k.shape[2:]))
        self.read_k, self.read_v = (x.double() for x in format_of(spec).as_read(self.k, self.v))
        self.stored = [bytes_of(x) for x in format_of(spec).encode(self.k, self.v).tensors]
        heads, dim = (_INDEXER_HEADS, INDEXER_DIM) if has_indexer else (0, 0)
        self.indexer = IndexerInputs(noise(heads, dim), noise(dim), noise(heads))
        self._next = 0

    def new(self, count: int) -> list[int]:
        """Numbers of ``count`` tokens that no request has had for a long time."""
        first, self._next = self._next, self._next + count
        return [i % self.TOKENS for i in range(first, first + count)]

    def again(self, tokens: list[int]) -> list[int]:
        """The same tokens, computed in another batch."""
        return [(i + self.TOKENS) % self.SIZE for i in tokens]

    def sequence(self, slot: int, tokens: list[int], prompt: int) -> Sequence:
        """A request with these tokens, none of them computed."""
        q, k, v = (x[tokens].transpose(0, 1) for x in (self.q, self.k, self.v))
        indexer = IndexerInputs(*(x[tokens].transpose(0, 1) for x in self.indexer))
        return Sequence(slot, q, k, v, indexer, [], prompt, tokens=tokens)


@dataclass(eq=False)
class Sequence(Request):
    """A request, and the numbers of all its tokens, those of later steps included."""

    tokens: list[int] = field(default_factory=list)


def bytes_of(x: Tensor) -> Tensor:
    """``[..., bytes]``, so that NaN equals itself."""
    return x.clone(memory_format=torch.contiguous_format).view(torch.uint8)


class Contents:
    """The dictionary: which token's K and V every host slot has, in each layer.

    Args:
        sim: the engine. Its host pool is unwritten.
        vocabulary: of its tokens.
    """

    def __init__(self, sim: Simulator, vocabulary: Vocabulary) -> None:
        self._sim = sim
        self._vocabulary = vocabulary
        self.token_at: list[dict[int, int]] = [{} for _ in range(sim.layers)]
        self._unwritten = [_token_bytes(sim, layer) for layer in range(sim.layers)]

    def tokens(self, sequence: Sequence, positions: range) -> tuple[int, ...]:
        """Numbers of the tokens at positions of a request that every layer has computed."""
        return tuple(self.token_at[0][slot] for slot in self.slots(sequence, positions))

    def slots(self, sequence: Sequence, positions: range) -> list[int]:
        """Host slots of positions."""
        size = self._sim.page_size
        return [sequence.host_pages[p // size] * size + p % size for p in positions]

    def write(self, sequence: Sequence, positions: range, layers: int) -> None:
        """Note that the first ``layers`` layers have computed tokens of a sequence."""
        slots = self.slots(sequence, positions)
        for at in self.token_at[:layers]:
            at.update(zip(slots, (sequence.tokens[p] for p in positions), strict=True))

    def check_host(self) -> None:
        """Every byte of the host pool is as the dictionary says, or was never written."""
        for layer, at in enumerate(self.token_at):
            got, slots, tokens = _token_bytes(self._sim, layer), list(at), list(at.values())
            for name, each, unwritten, stored in zip(
                "kvs", got, self._unwritten[layer], self._vocabulary.stored, strict=False
            ):
                expected = unwritten.clone()
                expected[slots] = stored[tokens, layer]
                wrong = (each != expected).any(-1).any(-1).nonzero().flatten().tolist()
                assert not wrong, f"layer {layer}: {name} differs in host slots {wrong}"

    def attention(
        self, sequence: Sequence, layer: int, position: int, kept: list[list[int]]
    ) -> Tensor:
        """Float64 attention of a position ``[Hq, Dv]``.

        Args:
            sequence: the request.
            layer: layer number.
            position: of the query.
            kept: for each query head, the positions that it attends.
        """
        words, at, group = self._vocabulary, self.token_at[layer], self._sim.spec.group_size
        tokens = torch.tensor([at[s] for s in self.slots(sequence, range(position + 1))])
        outs = []
        for head, positions in enumerate(kept):
            k, v = self._kv(tokens[positions], layer, head // group)
            q = words.q[sequence.tokens[position], layer, head]
            outs.append((k @ q.double() * self._sim.scale).softmax(-1) @ v)
        return torch.stack(outs)

    def attention_with_means(
        self, sequence: Sequence, layer: int, position: int, pages: list[list[int]]
    ) -> Tensor:
        """The same over the tail and ``pages`` of each query head, and over means of the others."""
        words, at, group = self._vocabulary, self.token_at[layer], self._sim.spec.group_size
        size = self._sim.page_size
        tokens = torch.tensor([at[s] for s in self.slots(sequence, range(position + 1))])
        full = position // size
        outs = []
        for head, chosen in enumerate(pages):
            k, v = self._kv(tokens, layer, head // group)
            others = [p for p in range(full) if p not in chosen]
            kept = positions_of(chosen, position, size)
            means = [x[: full * size].unflatten(0, (full, size))[others].mean(1) for x in (k, v)]
            k, v = (torch.cat([x[kept], mean]) for x, mean in zip((k, v), means, strict=True))
            logits = k @ words.q[sequence.tokens[position], layer, head].double() * self._sim.scale
            logits[len(kept) :] += math.log(size)
            outs.append(logits.softmax(-1) @ v)
        return torch.stack(outs)

    def _kv(self, tokens: Tensor, layer: int, head: int) -> tuple[Tensor, Tensor]:
        return (
            self._vocabulary.read_k[tokens, layer, head],
            self._vocabulary.read_v[tokens, layer, head],
        )


def positions_of(pages: list[int], position: int, size: int) -> list[int]:
    """Positions of full pages and of the tail page up to ``position``."""
    kept = [page * size + i for page in pages for i in range(size)]
    return [*kept, *range(position // size * size, position + 1)]


def _token_bytes(sim: Simulator, layer: int) -> list[Tensor]:
    """The host pool of a layer, ``[host slots, Hkv, bytes]`` each."""
    tensors = sim.manager.host.stored(layer).tensors
    return [bytes_of(x.transpose(1, 2).flatten(0, 1)) for x in tensors]


class PrefixCache:
    """Full pages by the tokens up to their ends, as SGLang's radix cache keeps them.

    Args:
        sim: the engine, whose free pages this class manages.

    Attributes:
        live: requests that have begun and not ended.
        replaced: slots of requests that got another page after their last forward.
    """

    def __init__(self, sim: Simulator) -> None:
        self._sim = sim
        self._pages: dict[tuple[int, ...], int] = {}
        self.live: list[Sequence] = []
        self.replaced: set[int] = set()

    def _keys(self, tokens: list[int]) -> list[tuple[int, ...]]:
        size, same = self._sim.page_size, tuple(i % Vocabulary.TOKENS for i in tokens)
        return [same[: end * size] for end in range(1, len(tokens) // size + 1)]

    def match(self, tokens: list[int]) -> list[int]:
        """Pages of the longest cached prefix."""
        keys = itertools.takewhile(self._pages.__contains__, self._keys(tokens))
        return [self._pages[key] for key in keys]

    def insert(self, sequence: Sequence) -> None:
        """Keep the computed pages; of two pages with the same prefix, the request's own is freed.

        SGLang replaces the page in the request's table while the request runs.
        """
        for index, key in enumerate(self._keys(sequence.tokens[: sequence.done])):
            own = sequence.host_pages[index]
            sequence.host_pages[index] = self._pages.setdefault(key, own)
            self.release([own])
            if sequence.host_pages[index] != own:
                self.replaced.add(sequence.slot)
                self._sim.coordinator.on_pages_replaced(sequence.slot)

    def release(self, pages: list[int]) -> None:
        """Free those of the pages that nobody has; they are the first to be allocated again."""
        used = set(self._pages.values()).union(*(x.host_pages for x in self.live))
        self._sim.free_host_pages += [page for page in pages if page not in used]

    def evict(self, count: int) -> None:
        """Free cached pages, leaves first, until ``count`` pages are free or none is left."""
        held = {page for sequence in self.live for page in sequence.host_pages}
        for key in sorted(self._pages, key=len, reverse=True):
            if len(self._sim.free_host_pages) >= count:
                break
            if self._pages[key] not in held:
                self.release([self._pages.pop(key)])


class PageOracle:
    """What algorithm and extensions keep of a page: as of a prompt that is this page alone.

    Args:
        sim: an engine of its own.
        vocabulary: of its tokens.
    """

    def __init__(self, sim: Simulator, vocabulary: Vocabulary) -> None:
        self._sim = sim
        self._vocabulary = vocabulary
        self._known: dict[tuple[int, ...], dict[str, Tensor]] = {}

    def page(self, tokens: tuple[int, ...]) -> dict[str, Tensor]:
        """By name, ``[L, ...]``, of a full page with these tokens."""
        if tokens not in self._known:
            sequence = self._vocabulary.sequence(1, list(tokens), len(tokens))
            self._sim.coordinator.on_request_begin(1)
            self._sim.prefill((sequence, len(tokens)))
            self._sim.end(sequence, free=True)
            self._known[tokens] = {
                name: kept[:, sequence.host_pages[0]].clone()
                for name, kept in page_tensors(self._sim).items()
            }
        return self._known[tokens]


def page_tensors(sim: Simulator) -> dict[str, Tensor]:
    """The tensors with an entry for each host page, ``[L, host pages, ...]``."""
    kinds = kept_tensors(sim.config, sim.algorithm, sim.policy)
    names = [name for name, kind in kinds.items() if kind.per == "page"]
    return {name: sim.representations.tensors[name].as_subclass(Tensor) for name in names}
