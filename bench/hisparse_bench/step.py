"""``hisparse bench step``: a decode step of several layers, with and without overlap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hisparse.errors import ConfigError
from hisparse.types import KVSpec
from hisparse_bench.options import Options
from hisparse_bench.random_requests import RandomRequests
from hisparse_bench.report import Case, Result
from hisparse_bench.shape import ModelShape
from hisparse_bench.timing import Candidate, time_in_turns

__all__ = ["MODES", "LayerWork", "StepBench"]

#: Implementation to the setting ``overlap``.
MODES: Final[Mapping[str, bool]] = {"off": False, "transfers": True}
_WARMUPS = 8
#: Of the query of the step before, in each step's.
_KEPT = 0.95


class LayerWork:
    """Products that stand for the rest of a layer, which transfers may run beside.

    Args:
        kv: shapes of the model.
        device: where it runs.
    """

    def __init__(self, kv: KVSpec, device: torch.device) -> None:
        width = kv.num_q_heads * kv.v_head_dim
        shape = (2, width, width)
        self._weights = torch.randn(shape, device=device).to(kv.dtype) * width**-0.5

    def run(self, out: Tensor) -> Tensor:
        """``out [T, Hq, Dv]`` through two square matrices."""
        hidden = out.flatten(1)
        for weight in self._weights:
            hidden = hidden @ weight
        return hidden


@dataclass(frozen=True, kw_only=True)
class StepBench(ModelShape):
    """The same requests twice: nothing overlaps, or transfers do.

    Attributes:
        context: tokens of each request.
        budget: tokens attended per step and row.
        batch: requests.
        layers: of a step.
        reuse_layers: layers that share a selection.
    """

    context: int = 8192
    budget: int = 1024
    batch: int = 1
    layers: int = 4
    reuse_layers: int = 2

    def run(self, options: Options) -> Case:
        """Overlap may not change a bit."""
        if self.budget % self.page_size or not 4 * self.page_size <= self.budget <= self.context:
            raise ConfigError(
                f"--budget: got {self.budget}, expected a multiple of --page-size "
                f"{self.page_size}, from {4 * self.page_size} to the context, {self.context}"
            )
        num_steps = options.num_steps + _WARMUPS
        steps = {name: self._steps(name, options, num_steps) for name in MODES}
        times = time_in_turns(
            {name: Candidate(work.step, work.prepare) for name, work in steps.items()},
            options.num_steps,
            device=options.device,
            num_warmups=_WARMUPS,
        )
        stats = steps["off"].world.stats
        return Case(
            name="step",
            params=self._params() | {"miss_ratio": round(1 - stats.hit_ratio, 4)},
            gate="passed" if self._agree(steps) else "failed",
            results=[Result.of(impl, seconds) for impl, seconds in times.items()],
        )

    def _steps(self, name: str, options: Options, num_steps: int) -> _Steps:
        world = RandomRequests(
            kv=self.kv,
            batch=self.batch,
            context=self.context // self.page_size * self.page_size,
            budget=self.budget,
            row_tokens=2 * self.budget,
            room=-(-num_steps // self.page_size) * self.page_size,
            device=options.device,
            seed=options.seed,
            reuse_layers=self.reuse_layers,
            overlap=MODES[name],
        )
        return _Steps(world, options.seed)

    def _agree(self, steps: dict[str, _Steps]) -> bool:
        tolerance = 2e-5 if self.dtype == torch.float32 else 2e-2
        off, transfers = (torch.stack(steps[name].outs) for name in MODES)
        return torch.equal(transfers, off) and steps["off"].is_right(tolerance)

    def _params(self) -> dict[str, Any]:
        return self.reported("context", "budget", "batch", "reuse_layers") | {
            "algorithm": "quest",
            "rest": "two square products a layer",
        }


class _Steps:
    """One world, and queries that drift from step to step, the same for the same seed."""

    def __init__(self, world: RandomRequests, seed: int) -> None:
        self.world = world
        self._random = torch.Generator().manual_seed(seed)
        self._work = LayerWork(world.kv, world.device)
        kv = world.kv
        self._queries = self._noise(kv.num_q_heads)
        self.outs: list[Tensor] = []

    def _noise(self, heads: int) -> Tensor:
        kv = self.world.kv
        shape = (kv.num_layers, self.world.batch, heads, kv.head_dim)
        return torch.randn(shape, generator=self._random)

    def prepare(self, step: int) -> None:
        kv = self.world.kv
        fresh = self._noise(kv.num_q_heads)
        self._queries = _KEPT * self._queries + (1 - _KEPT**2) ** 0.5 * fresh
        heads = (kv.num_kv_heads, kv.num_kv_heads)
        new = (self._queries, *map(self._noise, heads))
        self._tokens = [x.to(self.world.device, kv.dtype) for x in new]

    def step(self, step: int) -> None:
        """One token more, through all layers."""
        coordinator, outs = self.world.coordinator, []
        self.world.begin_token()
        for layer in range(self.world.kv.num_layers):
            q, k, v = (x[layer] for x in self._tokens)
            outs.append(coordinator.attention(layer, q, k, v))
            self._work.run(outs[-1])
        coordinator.forward_end()
        self.outs.append(torch.stack(outs))

    def is_right(self, tolerance: float) -> bool:
        """One more token, against attention in float64 over the pages that were selected."""
        self.prepare(0)
        self.world.begin_token()
        for layer in range(self.world.kv.num_layers):
            q, k, v = (x[layer] for x in self._tokens)
            out = self.world.coordinator.attention(layer, q, k, v).double().cpu()
            expected = self.world.attend(layer, q)
            if not torch.allclose(out, expected, rtol=tolerance, atol=tolerance):
                return False
        return True
