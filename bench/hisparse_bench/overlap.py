"""``hisparse bench step`` and ``prefill``: several layers, with and without overlap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hisparse.config import HiSparseConfig
from hisparse.engine.batches import PrefillBatch
from hisparse.engine.prefill import PrefillChunk
from hisparse.errors import ConfigError
from hisparse_bench.options import ModelShape, Options
from hisparse_bench.random_requests import RandomRequests
from hisparse_bench.report import Case
from hisparse_bench.timing import Candidate, timed_case

#: Implementation to the configuration key ``overlap``.
_MODES: Final[Mapping[str, bool]] = {"off": False, "transfers": True}
_REST = {"rest": "two square products a layer"}
_WARMUPS = 8
#: Cosine similarity of the queries of adjacent steps.
_COSINE = 0.95


class _Layers:
    """Forwards of the same tokens through all layers, determined by the seed.

    Two matrix products after each attention stand for the rest of a layer, beside which transfers
    can run.

    Attributes:
        outs: of each forward, ``[L, T, Hq, Dv]``.
    """

    def __init__(self, requests: RandomRequests, seed: int) -> None:
        self.requests = requests
        self.outs: list[Tensor] = []
        self._random = torch.Generator().manual_seed(seed)
        width = requests.kv.num_q_heads * requests.kv.v_head_dim
        shape = (2, width, width)
        self._weights = torch.randn(shape, device=requests.device).to(requests.kv.dtype)
        self._weights *= width**-0.5

    def noise(self, tokens: int, heads: int) -> Tensor:
        """``[L, T, heads, D]``."""
        kv = self.requests.kv
        return torch.randn(kv.num_layers, tokens, heads, kv.head_dim, generator=self._random)

    def take(self, *tokens: Tensor) -> None:
        """Set queries, keys and values of the next forward."""
        self.tokens = [x.to(self.requests.device, self.requests.kv.dtype) for x in tokens]

    def forward(self) -> list[Tensor]:
        """Run all layers of a forward that has begun, and end it."""
        coordinator, outs = self.requests.coordinator, []
        for layer in range(self.requests.kv.num_layers):
            q, k, v = (x[layer] for x in self.tokens)
            outs.append(coordinator.attention(layer, q, k, v))
            hidden = outs[-1].flatten(1)
            for weight in self._weights:
                hidden = hidden @ weight
        coordinator.forward_end()
        return outs

    @property
    def weight_bytes(self) -> int:
        """Bytes of the products' weights that a forward reads."""
        return self.requests.kv.num_layers * self._weights.nbytes

    def equals(self, out: Tensor, expected: Tensor) -> bool:
        """Whether an output equals that in float64, up to rounding."""
        slack = 2e-5 if self.requests.kv.dtype == torch.float32 else 2e-2
        return torch.allclose(out.double().cpu(), expected, rtol=slack, atol=slack)


@dataclass(frozen=True, kw_only=True)
class StepBench(ModelShape):
    """Decode steps of the same requests, without overlap and with transfers beside compute.

    Attributes:
        context: tokens of each request.
        budget: tokens attended per step and row.
        batch: requests.
        layers: layers of the model.
        reuse_layers: layers that share a selection.
        algorithm: name of the algorithm that selects pages.
    """

    context: int = 8192
    budget: int = 1024
    batch: int = 1
    layers: int = 4
    reuse_layers: int = 2
    algorithm: str = HiSparseConfig.algorithm

    def run(self, options: Options) -> Case:
        """Time both; the gate checks that overlap changes no bit of the outputs."""
        if self.budget % self.page_size or not 5 * self.page_size <= self.budget <= self.context:
            raise ConfigError(
                f"--budget: got {self.budget}, expected a multiple of --page-size "
                f"{self.page_size}, from {5 * self.page_size} to the context, {self.context}"
            )
        work = {name: self._steps(overlap, options) for name, overlap in _MODES.items()}
        case = timed_case(
            "step",
            self.reported("context", "budget", "batch", "reuse_layers")
            | {"algorithm": self.algorithm, **_REST},
            {name: Candidate(steps.run, steps.prepare) for name, steps in work.items()},
            options,
            agrees=lambda: _agree(work) and work["off"].is_correct(),
            moved=lambda: {name: steps.read_bytes() for name, steps in work.items()},
            num_warmups=_WARMUPS,
        )
        case.params["miss_ratio"] = round(1 - work["off"].requests.stats.hit_ratio, 4)
        return case

    def _steps(self, overlap: bool, options: Options) -> _Steps:
        num_steps = options.num_steps + _WARMUPS
        requests = RandomRequests(
            kv=self.kv,
            batch=self.batch,
            context=self.context // self.page_size * self.page_size,
            budget=self.budget,
            row_tokens=2 * self.budget,
            max_new_tokens=-(-num_steps // self.page_size) * self.page_size,
            device=options.device,
            algorithm=self.algorithm,
            seed=options.seed,
            reuse_layers=self.reuse_layers,
            overlap=overlap,
        )
        return _Steps(requests, options.seed)


class _Steps(_Layers):
    """Decode steps with queries that drift from step to step."""

    def __init__(self, requests: RandomRequests, seed: int) -> None:
        super().__init__(requests, seed)
        self._queries = self.noise(requests.batch, requests.kv.num_q_heads)

    def prepare(self, step: int) -> None:
        """Draw the queries, keys and values of the next token."""
        kv, batch = self.requests.kv, self.requests.batch
        fresh = self.noise(batch, kv.num_q_heads)
        self._queries = _COSINE * self._queries + (1 - _COSINE**2) ** 0.5 * fresh
        k, v = (self.noise(batch, kv.num_kv_heads) for _ in "kv")
        self.take(self._queries, k, v)

    def run(self, step: int) -> None:
        """Decode one token through all layers."""
        self.requests.begin_token()
        self.outs.append(torch.stack(self.forward()))

    def read_bytes(self) -> int:
        """Bytes that a step read: what :meth:`RandomRequests.read_bytes` counts, and weights."""
        read = self.requests.read_bytes(self.requests.stats)
        return read // len(self.outs) + self.weight_bytes

    def is_correct(self) -> bool:
        """Decode one more token and compare it with float64 attention over the selection."""
        self.prepare(0)
        self.requests.coordinator.observe(self.requests.observe)
        self.requests.begin_token()
        for layer in range(self.requests.kv.num_layers):
            q, k, v = (x[layer] for x in self.tokens)
            out = self.requests.coordinator.attention(layer, q, k, v)
            if not self.equals(out, self.requests.attend(layer, q)):
                return False
        return True


def _agree(work: Mapping[str, _Layers]) -> bool:
    """Whether all forwards gave the same bits in all modes."""
    first, second = (torch.stack(x.outs) for x in work.values())
    return torch.equal(first, second)


@dataclass(frozen=True, kw_only=True)
class PrefillBench(ModelShape):
    """A chunk after a prefix in host memory, without overlap and with transfers beside compute.

    Attributes:
        context: tokens of the prefix.
        chunk: tokens of the chunk.
        tile: tokens of a staging tile.
        layers: layers of the model.
    """

    context: int = 8192
    chunk: int = 512
    tile: int = 2048
    layers: int = 4

    def run(self, options: Options) -> Case:
        """Time both; the gate checks that overlap changes no bit of the outputs."""
        for flag in ("context", "chunk", "tile"):
            if getattr(self, flag) % self.page_size:
                raise ConfigError(
                    f"--{flag}: got {getattr(self, flag)}, expected a multiple of --page-size "
                    f"{self.page_size}"
                )
        work = {name: self._chunks(overlap, options) for name, overlap in _MODES.items()}
        return timed_case(
            "prefill",
            self.reported("context", "chunk", "tile") | _REST,
            {name: Candidate(chunks.run, chunks.prepare) for name, chunks in work.items()},
            options,
            agrees=lambda: _agree(work) and work["off"].is_correct(),
            moved=lambda: {name: chunks.read_bytes() for name, chunks in work.items()},
        )

    def _chunks(self, overlap: bool, options: Options) -> _Chunks:
        requests = RandomRequests(
            kv=self.kv,
            batch=1,
            context=self.context,
            budget=5 * self.page_size,  # The smallest; a chunk is attended densely.
            row_tokens=16 * self.page_size,
            max_new_tokens=self.chunk,
            device=options.device,
            seed=options.seed,
            staging_pages=max(1, self.tile // self.page_size),
            overlap=overlap,
        )
        return _Chunks(requests, self.chunk, options.seed)


class _Chunks(_Layers):
    """Prefills of a chunk of random tokens, drawn again for each run."""

    def __init__(self, requests: RandomRequests, length: int, seed: int) -> None:
        super().__init__(requests, seed)
        self._length = length

    def prepare(self, step: int) -> None:
        """Draw the queries, keys and values of the chunk."""
        kv = self.requests.kv
        heads = (kv.num_q_heads, kv.num_kv_heads, kv.num_kv_heads)
        self.take(*(self.noise(self._length, each) for each in heads))

    def run(self, step: int) -> None:
        """Prefill the chunk through all layers, in a request that begins with it."""
        requests = self.requests
        size, start = requests.kv.page_size, requests.context
        pages = requests.table[0, : (start + self._length) // size]
        position = torch.arange(start, start + self._length, device=requests.device)
        chunk = PrefillChunk(slot=1, start=start, length=self._length, offset=0, host_pages=pages)
        host_slots = pages[position // size].long() * size + position % size
        requests.coordinator.on_request_begin(1)
        requests.coordinator.forward_begin(PrefillBatch(chunks=[chunk], host_slots=host_slots))
        # The outputs of all tokens would take more memory than the pool.
        self.outs.append(torch.stack([out[-1] for out in self.forward()]))

    def read_bytes(self) -> int:
        """Bytes that a run read: K and V in host memory, those that are attended, and weights."""
        requests = self.requests
        tokens = requests.context + self._length
        attended = tokens * requests.host.format.token_bytes
        from_host = requests.stats.prefill_read_bytes // len(self.outs)
        return from_host + attended + self.weight_bytes

    def is_correct(self) -> bool:
        """Whether the last token of the last run equals float64 attention over all tokens."""
        kv, scale = self.requests.kv, self.requests.policy.scale
        for layer in range(kv.num_layers):
            q, *new = (x[layer].double().cpu() for x in self.tokens)
            prefix = (x[0].transpose(0, 1).double().cpu() for x in self.requests.contiguous(layer))
            k, v = (torch.cat(parts) for parts in zip(prefix, new, strict=True))
            k, v = (x.repeat_interleave(kv.group_size, dim=1) for x in (k, v))
            weights = (torch.einsum("thd,hd->ht", k, q[-1]) * scale).softmax(-1)
            expected = torch.einsum("ht,thd->hd", weights, v)
            if not self.equals(self.outs[-1][layer], expected):
                return False
        return True
