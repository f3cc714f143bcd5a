"""``hisparse bench step``: a decode step of several layers, with and without overlap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.types import KVSpec
from hisparse_bench.options import ModelShape, Options
from hisparse_bench.random_requests import RandomRequests
from hisparse_bench.report import Case, Result
from hisparse_bench.timing import Candidate, time_in_turns

#: Implementation to the configuration key ``overlap``.
MODES: Final[Mapping[str, bool]] = {"off": False, "transfers": True}
_WARMUPS = 8
#: Cosine similarity of the queries of adjacent steps.
_COSINE = 0.95


class LayerWork:
    """Matrix products that stand for the rest of a layer, beside which transfers can run.

    Args:
        kv: shapes of the model.
        device: device of the products.
    """

    def __init__(self, kv: KVSpec, device: torch.device) -> None:
        width = kv.num_q_heads * kv.v_head_dim
        shape = (2, width, width)
        self._weights = torch.randn(shape, device=device).to(kv.dtype) * width**-0.5

    def run(self, out: Tensor) -> Tensor:
        """Multiply ``out [T, Hq, Dv]`` by two square matrices."""
        hidden = out.flatten(1)
        for weight in self._weights:
            hidden = hidden @ weight
        return hidden


@dataclass(frozen=True, kw_only=True)
class StepBench(ModelShape):
    """The same requests twice, without overlap and with transfers beside compute.

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
        num_steps = options.num_steps + _WARMUPS
        work = {name: self._workload(name, options, num_steps) for name in MODES}
        times = time_in_turns(
            {name: Candidate(steps.run, steps.prepare) for name, steps in work.items()},
            options.num_steps,
            device=options.device,
            num_warmups=_WARMUPS,
        )
        stats = work["off"].requests.stats
        return Case(
            name="step",
            params=self._params() | {"miss_ratio": round(1 - stats.hit_ratio, 4)},
            gate="passed" if self._agree(work) else "failed",
            results=[Result.of(impl, seconds) for impl, seconds in times.items()],
        )

    def _workload(self, name: str, options: Options, num_steps: int) -> _DecodeSteps:
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
            overlap=MODES[name],
        )
        return _DecodeSteps(requests, options.seed)

    def _agree(self, work: dict[str, _DecodeSteps]) -> bool:
        tolerance = 2e-5 if self.dtype == torch.float32 else 2e-2
        off, transfers = (torch.stack(work[name].outs) for name in MODES)
        return torch.equal(transfers, off) and work["off"].is_correct(tolerance)

    def _params(self) -> dict[str, Any]:
        return self.reported("context", "budget", "batch", "reuse_layers") | {
            "algorithm": self.algorithm,
            "rest": "two square products a layer",
        }


class _DecodeSteps:
    """Decode steps with queries that drift from step to step, determined by the seed."""

    def __init__(self, requests: RandomRequests, seed: int) -> None:
        self.requests = requests
        self._random = torch.Generator().manual_seed(seed)
        self._layer_work = LayerWork(requests.kv, requests.device)
        self._queries = self._noise(requests.kv.num_q_heads)
        self.outs: list[Tensor] = []

    def _noise(self, heads: int) -> Tensor:
        kv = self.requests.kv
        shape = (kv.num_layers, self.requests.batch, heads, kv.head_dim)
        return torch.randn(shape, generator=self._random)

    def prepare(self, step: int) -> None:
        """Draw the queries, keys and values of the next token."""
        kv = self.requests.kv
        fresh = self._noise(kv.num_q_heads)
        self._queries = _COSINE * self._queries + (1 - _COSINE**2) ** 0.5 * fresh
        heads = (kv.num_kv_heads, kv.num_kv_heads)
        new = (self._queries, *map(self._noise, heads))
        self._tokens = [x.to(self.requests.device, kv.dtype) for x in new]

    def run(self, step: int) -> None:
        """Decode one token through all layers."""
        coordinator, outs = self.requests.coordinator, []
        self.requests.begin_token()
        for layer in range(self.requests.kv.num_layers):
            q, k, v = (x[layer] for x in self._tokens)
            outs.append(coordinator.attention(layer, q, k, v))
            self._layer_work.run(outs[-1])
        coordinator.forward_end()
        self.outs.append(torch.stack(outs))

    def is_correct(self, tolerance: float) -> bool:
        """Decode one more token and compare it with float64 attention over the selection."""
        self.prepare(0)
        self.requests.begin_token()
        for layer in range(self.requests.kv.num_layers):
            q, k, v = (x[layer] for x in self._tokens)
            out = self.requests.coordinator.attention(layer, q, k, v).double().cpu()
            expected = self.requests.attend(layer, q)
            if not torch.allclose(out, expected, rtol=tolerance, atol=tolerance):
                return False
        return True
