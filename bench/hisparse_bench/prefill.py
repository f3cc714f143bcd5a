"""``hisparse bench prefill``: a chunk after a prefix in host memory, with and without overlap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hisparse.engine.batches import PrefillBatch
from hisparse.engine.prefill import PrefillChunk
from hisparse.errors import ConfigError
from hisparse_bench.options import ModelShape, Options
from hisparse_bench.random_requests import RandomRequests
from hisparse_bench.report import Case, Result
from hisparse_bench.step import MODES, LayerWork
from hisparse_bench.timing import Candidate, time_in_turns


@dataclass(frozen=True, kw_only=True)
class PrefillBench(ModelShape):
    """The same chunk twice, without overlap and with transfers beside compute.

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
        chunks = {name: self._chunks(name, options) for name in ("off", "transfers")}
        times = time_in_turns(
            {name: Candidate(work.run, work.prepare) for name, work in chunks.items()},
            options.num_steps,
            device=options.device,
        )
        off, transfers = (torch.stack(work.outs) for work in chunks.values())
        is_correct = torch.equal(off, transfers) and chunks["off"].is_correct()
        return Case(
            name="prefill",
            params=self._params(),
            gate="passed" if is_correct else "failed",
            results=[Result.of(impl, seconds) for impl, seconds in times.items()],
        )

    def _chunks(self, name: str, options: Options) -> _Chunks:
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
            overlap=MODES[name],
        )
        return _Chunks(requests, self.chunk, options.seed)

    def _params(self) -> dict[str, Any]:
        return self.reported("context", "chunk", "tile") | {"rest": "two square products a layer"}


class _Chunks:
    """Prefills of a chunk of random tokens, drawn again for each run."""

    def __init__(self, requests: RandomRequests, length: int, seed: int) -> None:
        self._requests, self._length = requests, length
        self._random = torch.Generator().manual_seed(seed)
        self._layer_work = LayerWork(requests.kv, requests.device)
        self.outs: list[Tensor] = []

    def prepare(self, step: int) -> None:
        """Draw the queries, keys and values of the chunk."""
        kv = self._requests.kv
        heads = (kv.num_q_heads, kv.num_kv_heads, kv.num_kv_heads)
        shapes = [(kv.num_layers, self._length, each, kv.head_dim) for each in heads]
        new = (torch.randn(shape, generator=self._random) for shape in shapes)
        self._tokens = [x.to(self._requests.device, kv.dtype) for x in new]

    def run(self, step: int) -> None:
        """Prefill the chunk through all layers, in a request that begins with it."""
        requests = self._requests
        size, start = requests.kv.page_size, requests.context
        pages = requests.table[0, : (start + self._length) // size]
        position = torch.arange(start, start + self._length, device=requests.device)
        chunk = PrefillChunk(slot=1, start=start, length=self._length, offset=0, host_pages=pages)
        host_slots = pages[position // size].long() * size + position % size
        coordinator, outs = requests.coordinator, []
        coordinator.on_request_begin(1)
        coordinator.forward_begin(PrefillBatch(chunks=[chunk], host_slots=host_slots))
        for layer in range(requests.kv.num_layers):
            q, k, v = (x[layer] for x in self._tokens)
            outs.append(coordinator.attention(layer, q, k, v))
            self._layer_work.run(outs[-1])
        coordinator.forward_end()
        # The outputs of all tokens would take more memory than the pool.
        self.outs.append(torch.stack([out[-1] for out in outs]))

    def is_correct(self) -> bool:
        """Whether the last token of the last run equals float64 attention over all tokens."""
        kv, scale = self._requests.kv, self._requests.policy.scale
        tolerance = 2e-5 if kv.dtype == torch.float32 else 2e-2
        for layer in range(kv.num_layers):
            q, *new = (x[layer].double().cpu() for x in self._tokens)
            prefix = (x[0].transpose(0, 1).double().cpu() for x in self._requests.contiguous(layer))
            k, v = (torch.cat(parts) for parts in zip(prefix, new, strict=True))
            k, v = (x.repeat_interleave(kv.group_size, dim=1) for x in (k, v))
            weights = (torch.einsum("thd,hd->ht", k, q[-1]) * scale).softmax(-1)
            expected = torch.einsum("ht,thd->hd", weights, v)
            out = self.outs[-1][layer].double().cpu()
            if not torch.allclose(out, expected, rtol=tolerance, atol=tolerance):
                return False
        return True
