"""``hisparse bench decode``: one layer's attention in a decode step, with selection and swap-in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hisparse.algorithms import ALGORITHMS
from hisparse.cache.counters import CacheStats
from hisparse.cache.streams import Pending, SideStream
from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError
from hisparse.types import IndexerInputs, PagedKV
from hisparse_bench.options import DEEPSEEK, ModelShape, Options
from hisparse_bench.peers import (
    as_pages,
    flash_attention_decode,
    flash_mla_decode,
    flashinfer_decode,
    reason_to_leave_out,
    torch_native_decode,
)
from hisparse_bench.random_requests import Miss, RandomRequests
from hisparse_bench.report import Case
from hisparse_bench.timing import Candidate, kernel_times, timed_case

#: Dense attention of a layer, queries ``[B, Hq, D]`` to ``[B, Hq, Dv]``.
_Attend = Callable[[Tensor], Tensor]
#: Tokens decoded to find the drift of the queries that gives the requested miss ratio.
_CALIBRATION_TOKENS = 40
_WARMUPS = 8
#: Steps whose kernels are timed one by one, on a GPU.
_PROFILED = 16

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class DecodeBench(ModelShape):
    """The served path beside dense attention over contiguous keys and values.

    An algorithm that asks the model's indexer is timed with the shape of DeepSeek-V3.2.

    Attributes:
        context: tokens of each request.
        budget: tokens attended per step and row.
        misses: fraction of the selected pages that are not resident; 0 keeps all pages resident, 1
            drops them before each token.
        batch: requests.
        layers: layers of the model; each timed step runs the next one.
        algorithm: name of the algorithm that selects pages.
        miss: "host" also times a step that attends missing pages in host memory, and "auto" that
            and its own choice, all with the same queries.
    """

    context: int = 32768
    budget: int = 2048
    misses: float = 0.15
    batch: int = 1
    layers: int = 2
    algorithm: str = HiSparseConfig.algorithm
    miss: Miss = "transfer"

    def __post_init__(self) -> None:
        if not ALGORITHMS.get(self.algorithm).indexer:
            return
        for name, expected in DEEPSEEK.items():
            got = getattr(self, name)
            if got not in (expected, getattr(ModelShape, name)):
                raise ConfigError(
                    f"--{name.replace('_', '-')}: got {got}, expected {expected}, that of "
                    f"DeepSeek-V3.2, whose indexer algorithm {self.algorithm!r} asks"
                )
            object.__setattr__(self, name, expected)

    def run(self, options: Options) -> Case:
        """Time all implementations; the gate compares with float64 attention over the selection."""
        self._check()
        num_steps = options.num_steps + _WARMUPS
        num_tokens = -(-(num_steps + _PROFILED) // self.layers) + _CALIBRATION_TOKENS + 2
        on = options.device.type
        # A GPU's own stream does not tell when its work runs.
        aside = _TimedSideStream() if on == "cpu" and self.miss != "transfer" else None
        ways: tuple[Miss, ...] = ("host", self.miss) if self.miss != "transfer" else ()
        works, agrees = {}, True
        for miss in dict.fromkeys((*ways, "transfer")):
            own = aside if miss == "host" else None
            work = DecodeWorkload(self._make_requests(options, num_tokens, miss, own), self.misses)
            agrees = work.agrees() and agrees
            work.calibrate(_CALIBRATION_TOKENS)
            works[on if miss == "transfer" else f"{on}_{miss}"] = work
        work, requests = works[on], works[on].requests
        before = {name: (each.requests.stats, each.requests.length) for name, each in works.items()}
        peers = work.peers()
        ours = {name: Candidate(each.decode, each.prepare) for name, each in works.items()}

        def moved() -> dict[str, int]:
            own = {name: each.bytes_since(*before[name]) for name, each in works.items()}
            return dict.fromkeys(peers, requests.context_bytes) | own

        case = timed_case(
            "decode",
            self._params() | ({"left_out": work.left_out} if work.left_out else {}),
            peers | ours,
            options,
            agrees=lambda: agrees,
            moved=moved,
            num_warmups=_WARMUPS,
        )
        case.params["miss_ratio"] = round(miss_ratio(before[on][0], requests.stats), 4)
        if aside is not None:
            host = f"{on}_host"
            num_bytes = works[host].away_bytes_since(*before[host])
            case.params["away"] = {"bytes": num_bytes} | aside.medians_us(options.num_steps)
        if on == "cuda" and case.gate == "passed":
            steps = range(num_steps, num_steps + _PROFILED)
            case.params["kernels_us"] = kernel_times(ours[on], steps)
        return case

    def _check(self) -> None:
        size = self.page_size
        for flag, tokens in (("--context", self.context), ("--budget", self.budget)):
            if tokens % size or tokens < 4 * size:
                raise ConfigError(
                    f"{flag}: got {tokens}, expected a multiple of --page-size {size}, "
                    f"{4 * size} or more"
                )
        if self.budget > self.context:
            raise ConfigError(f"--budget: got {self.budget}, expected at most the context")

    def _make_requests(
        self,
        options: Options,
        num_tokens: int,
        miss: Miss = "transfer",
        aside: SideStream | None = None,
    ) -> RandomRequests:
        """Requests that can decode ``num_tokens``."""
        num_tokens = -(-num_tokens // self.page_size) * self.page_size
        row_tokens = 2 * self.budget if self.misses else self.context + num_tokens
        return RandomRequests(
            kv=self.kv,
            batch=self.batch,
            context=self.context,
            budget=self.budget,
            row_tokens=row_tokens,
            max_new_tokens=num_tokens,
            device=options.device,
            algorithm=self.algorithm,
            seed=options.seed,
            miss=miss,
            aside=aside,
        )

    def _params(self) -> dict[str, Any]:
        return self.reported("context", "budget", "batch") | {"algorithm": self.algorithm}


def miss_ratio(before: CacheStats, after: CacheStats) -> float:
    """Missing pages of the pages that were selected between two counts."""
    missed = after.miss_pages - before.miss_pages
    return missed / (missed + after.hit_pages - before.hit_pages)


class _TimedSideStream(SideStream):
    """Times what a layer starts for missing pages: the CPU's attention, then their load."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def start(self, work: Callable[[], _T]) -> Pending[_T]:
        begin = time.perf_counter()
        started = super().start(work)
        self._seconds.append(time.perf_counter() - begin)
        return started

    def medians_us(self, num_steps: int) -> dict[str, float]:
        """Medians of the last steps."""
        last = self._seconds[-2 * num_steps :]
        parts = {"attend_us": last[::2], "load_us": last[1::2]}
        return {name: round(1e6 * median(each), 1) for name, each in parts.items()}


class DecodeWorkload:
    """Decode steps with queries that drift from token to token, and the peers on the same K/V.

    Args:
        requests: decoded through the coordinator.
        misses: requested fraction of selected pages that are not resident.

    Attributes:
        requests: see above.
        drift: part of a token's queries that is new, 1 for all.
    """

    def __init__(self, requests: RandomRequests, misses: float) -> None:
        self.requests, self._misses = requests, misses
        #: Why a peer that needs CUDA is left out, by its name.
        self.left_out: dict[str, str] = {}
        kv = requests.kv
        shape = (kv.num_layers, requests.batch, kv.num_q_heads, kv.head_dim)
        self._queries = requests.random(*shape)
        self._converted = self._queries.to(kv.dtype)
        self.drift = 0.3 if misses else 1.0
        self._layer = kv.num_layers - 1
        #: By layer; empty: the model has no indexer.
        self._indexer: list[IndexerInputs] = []
        self._begin_token()

    def _begin_token(self) -> None:
        """Draw K, V and indexer inputs of a token; the indexer's queries drift like the model's."""
        self._kv = self.requests.new_token()
        if not self.requests.kv.index_head_dim:
            return
        fresh = [self.requests.indexer_inputs(len(self._kv[0])) for _ in self._queries]
        if self._indexer:
            kept = (1 - self.drift**2) ** 0.5
            fresh = [
                new._replace(queries=kept * old.queries + self.drift * new.queries)
                for old, new in zip(self._indexer, fresh, strict=True)
            ]
        self._indexer = fresh

    @property
    def query(self) -> Tensor:
        """The current layer's queries, ``[B, Hq, D]``."""
        return self._converted[self._layer]

    def prepare(self, step: int) -> None:
        """Advance to the next layer, or to the first layer of the next token."""
        requests = self.requests
        self._layer = (self._layer + 1) % requests.kv.num_layers
        if self._layer:
            return
        requests.coordinator.forward_end()
        if self._misses == 1:
            requests.drop_resident()
        requests.begin_token()
        self._begin_token()
        fresh = requests.random(*self._queries.shape)
        self._queries = (1 - self.drift**2) ** 0.5 * self._queries + self.drift * fresh
        # What is timed converts nothing, as the peers' queries are converted too.
        self._converted = self._queries.to(self._converted.dtype)

    def decode(self, step: int) -> Tensor:
        """Attention of the current layer."""
        indexer = self._indexer[self._layer] if self._indexer else None
        return self.requests.coordinator.attention(self._layer, self.query, *self._kv, indexer)

    def bytes_since(self, before: CacheStats, first: int) -> int:
        """Bytes that a step read since counts ``before``, when the context had ``first`` tokens."""
        steps, read = self._steps_since(first), self.requests.read_bytes
        return (read(self.requests.stats) - read(before)) // steps

    def away_bytes_since(self, before: CacheStats, first: int) -> int:
        """Of these, the bytes that the CPU attended in host memory."""
        steps, page_bytes = self._steps_since(first), self.requests.page_bytes
        return (self.requests.stats.away_pages - before.away_pages) * page_bytes // steps

    def _steps_since(self, first: int) -> int:
        """Steps since the context had ``first`` tokens; ends the token, as counts are of tokens."""
        layers = self.requests.kv.num_layers
        while self._layer < layers - 1:
            self.prepare(0)
            self.decode(0)
        return (self.requests.length - first) * layers

    def calibrate(self, num_tokens: int) -> None:
        """Adjust the drift to the requested miss ratio; faster drift misses more pages."""
        layers = self.requests.kv.num_layers
        for token in range(num_tokens):
            before = self.requests.stats
            for step in range(layers):
                self.prepare(step)
                self.decode(step)
            got = miss_ratio(before, self.requests.stats)
            if self._misses and token >= 4:
                self.drift *= min(max((self._misses / max(got, 1e-3)) ** 0.5, 0.8), 1.25)
                self.drift = min(self.drift, 1.0)

    def agrees(self) -> bool:
        """Whether one token's output in all layers equals float64 attention over the selection."""
        tolerance = 2e-5 if self.requests.kv.dtype == torch.float32 else 2e-2
        self.requests.coordinator.observe(self.requests.observe)
        for step in range(self.requests.kv.num_layers):
            self.prepare(step)
            out = self.decode(step).double().cpu()
            expected = self.requests.attend(self._layer, self.query)
            if not torch.allclose(out, expected, atol=tolerance, rtol=tolerance):
                return False
        self.requests.coordinator.observe(None)  # What is timed keeps no selection.
        return True

    def peers(self) -> dict[str, Candidate]:
        """Dense attention over contiguous K/V: SDPA, and what the device's libraries have."""
        requests = self.requests
        contexts = [requests.contiguous(layer) for layer in range(requests.kv.num_layers)]
        scale, queries = requests.policy.scale, self._converted

        def sdpa(step: int) -> Tensor:
            layer = step % len(contexts)
            k, v = contexts[layer]
            # The queries of a KV head as one sequence: at least as fast as head by head.
            q = queries[layer].unflatten(1, (k.shape[1], -1))
            return scaled_dot_product_attention(q, k, v, scale=scale)

        found = {"sdpa": Candidate(sdpa)}
        if requests.device.type == "cuda":
            for name, make in self._gpu_peers(contexts).items():
                found |= self._checked(name, make, sdpa(0))
        elif requests.kv.attention == "MLA":
            self.left_out["torch_native"] = "it is timed only for MHA and GQA"
        else:
            lens = torch.full((requests.batch,), requests.context)
            made = [torch_native_decode(kv, lens, scale) for kv in contexts]
            if by_layer := [decode for decode in made if decode is not None]:
                found["torch_native"] = _layer_by_layer(by_layer, queries)
        return found

    def _gpu_peers(self, contexts: Sequence[PagedKV]) -> dict[str, Callable[[], list[_Attend]]]:
        """What makes the dense attention of each layer, by peer."""
        requests = self.requests
        batch, heads, scale = requests.batch, requests.kv.num_q_heads, requests.policy.scale
        if requests.kv.attention == "MLA":
            return {"flash_mla": lambda: [flash_mla_decode(kv, scale) for kv in contexts]}
        pages = cache(lambda: [as_pages(kv, requests.kv.page_size) for kv in contexts])

        def flashinfer(tensor_cores: bool) -> list[_Attend]:
            how = {"tensor_cores": tensor_cores}
            return [flashinfer_decode(kv, batch, heads, scale, **how) for kv in pages()]

        # With and without tensor cores: which is faster depends on the GPU.
        return {
            "flashinfer": lambda: flashinfer(False),
            "flashinfer_tensor_cores": lambda: flashinfer(True),
            "flash_attention_3": lambda: [flash_attention_decode(kv, scale) for kv in contexts],
        }

    def _checked(
        self, name: str, make: Callable[[], list[_Attend]], expected: Tensor
    ) -> dict[str, Candidate]:
        """A peer, unless its first layer is not as ``expected``, ``[B, Hkv, G, Dv]``."""
        queries = self._converted
        by_layer: list[_Attend] = []

        def agrees() -> bool:
            by_layer.extend(make())
            got, wanted = by_layer[0](queries[0]), expected.flatten(1, 2)
            return torch.allclose(got.float(), wanted.float(), atol=2e-2, rtol=2e-2)

        if reason := reason_to_leave_out(agrees):
            self.left_out[name] = reason
            return {}
        return {name: _layer_by_layer(by_layer, queries)}


def _layer_by_layer(by_layer: Sequence[_Attend], queries: Tensor) -> Candidate:
    """Dense attention; each step runs the next layer."""

    def run(step: int) -> Tensor:
        layer = step % len(by_layer)
        return by_layer[layer](queries[layer])

    return Candidate(run)
