"""``hisparse bench prefill``: a chunk over a prefix in host memory, with and without overlap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hisparse.engine.step import PrefillBatch, PrefillChunk
from hisparse.errors import ConfigError
from hisparse_bench.options import Options
from hisparse_bench.random_requests import RandomRequests
from hisparse_bench.report import Case, Result
from hisparse_bench.shape import ModelShape
from hisparse_bench.step import MODES, LayerWork
from hisparse_bench.timing import Candidate, time_in_turns

__all__ = ["PrefillBench"]


@dataclass(frozen=True, kw_only=True)
class PrefillBench(ModelShape):
    """The same chunk twice: nothing overlaps, and writes and tiles of the prefix do.

    Attributes:
        context: tokens of the prefix.
        chunk: tokens that are computed.
        tile: tokens of the prefix that are brought in at a time.
        layers: of a forward.
    """

    context: int = 8192
    chunk: int = 512
    tile: int = 2048
    layers: int = 4

    def run(self, options: Options) -> Case:
        """Overlap may not change a bit."""
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
        right = torch.equal(off, transfers) and chunks["off"].is_right()
        return Case(
            name="prefill",
            params=self._params(),
            gate="passed" if right else "failed",
            results=[Result.of(impl, seconds) for impl, seconds in times.items()],
        )

    def _chunks(self, name: str, options: Options) -> _Chunks:
        world = RandomRequests(
            kv=self.kv,
            batch=1,
            context=self.context,
            budget=4 * self.page_size,
            row_tokens=16 * self.page_size,
            room=self.chunk,
            device=options.device,
            seed=options.seed,
            staging_pages=max(1, self.tile // self.page_size),
            overlap=MODES[name],
        )
        return _Chunks(world, self.chunk, options.seed)

    def _params(self) -> dict[str, Any]:
        return self.reported("context", "chunk", "tile") | {"rest": "two square products a layer"}


class _Chunks:
    """One world, and the tokens of a chunk, drawn anew for each run."""

    def __init__(self, world: RandomRequests, length: int, seed: int) -> None:
        self._world, self._length = world, length
        self._random = torch.Generator().manual_seed(seed)
        self._work = LayerWork(world.kv, world.device)
        self.outs: list[Tensor] = []

    def prepare(self, step: int) -> None:
        kv = self._world.kv
        heads = (kv.num_q_heads, kv.num_kv_heads, kv.num_kv_heads)
        shapes = [(kv.num_layers, self._length, each, kv.head_dim) for each in heads]
        new = (torch.randn(shape, generator=self._random) for shape in shapes)
        self._tokens = [x.to(self._world.device, kv.dtype) for x in new]

    def run(self, step: int) -> None:
        """The chunk through all layers; a request of its own, so that it is the first one."""
        world, size, start = self._world, self._world.kv.page_size, self._world.context
        pages = world.table[0, : (start + self._length) // size]
        position = torch.arange(start, start + self._length, device=world.device)
        chunk = PrefillChunk(slot=1, start=start, length=self._length, offset=0, host_pages=pages)
        host_slots = pages[position // size].long() * size + position % size
        coordinator, outs = world.coordinator, []
        coordinator.on_request_begin(1)
        coordinator.forward_begin(PrefillBatch(chunks=[chunk], host_slots=host_slots))
        for layer in range(world.kv.num_layers):
            q, k, v = (x[layer] for x in self._tokens)
            outs.append(coordinator.attention(layer, q, k, v))
            self._work.run(outs[-1])
        coordinator.forward_end()
        # Of all tokens it would take more room than the pool.
        self.outs.append(torch.stack([out[-1] for out in outs]))

    def is_right(self) -> bool:
        """The last token of the last run, against attention in float64 over all before it."""
        kv, scale = self._world.kv, self._world.policy.scale
        tolerance = 2e-5 if kv.dtype == torch.float32 else 2e-2
        for layer in range(kv.num_layers):
            q, *new = (x[layer].double().cpu() for x in self._tokens)
            prefix = (x[0].transpose(0, 1).double().cpu() for x in self._world.contiguous(layer))
            k, v = (torch.cat(parts) for parts in zip(prefix, new, strict=True))
            k, v = (x.repeat_interleave(kv.group_size, dim=1) for x in (k, v))
            weights = (torch.einsum("thd,hd->ht", k, q[-1]) * scale).softmax(-1)
            expected = torch.einsum("ht,thd->hd", weights, v)
            out = self.outs[-1][layer].double().cpu()
            if not torch.allclose(out, expected, rtol=tolerance, atol=tolerance):
                return False
        return True
