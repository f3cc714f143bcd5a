"""``hisparse bench decode``: attention of one layer and step, selection and swap-in included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hisparse.errors import ConfigError
from hisparse_bench.options import Options
from hisparse_bench.peers import reason_to_leave_out
from hisparse_bench.peers.flashinfer_decode import flashinfer_decode
from hisparse_bench.peers.sglang_native import torch_native_decode
from hisparse_bench.random_requests import RandomRequests
from hisparse_bench.report import Case, Result
from hisparse_bench.shape import ModelShape
from hisparse_bench.timing import Candidate, time_in_turns

__all__ = ["DecodeBench"]

#: Tokens decoded to find how fast queries have to drift for the wanted misses.
_SETTLE = 40
_WARMUPS = 8


@dataclass(frozen=True, kw_only=True)
class DecodeBench(ModelShape):
    """The served path against dense attention over contiguous keys and values.

    Attributes:
        context: tokens of each request.
        budget: tokens attended per step and row.
        misses: share of the selected pages that are not resident; 0: every page is.
        batch: requests.
        layers: take turns.
    """

    context: int = 32768
    budget: int = 2048
    misses: float = 0.15
    batch: int = 1
    layers: int = 2

    def run(self, options: Options) -> Case:
        """The output is compared with attention in float64 over the pages that were selected."""
        self._check()
        steps = options.num_steps + _WARMUPS
        world = self._world(options, -(-steps // self.layers) + _SETTLE + 2)
        work = _Work(world, self.misses)
        gate = "passed" if work.agrees() else "failed"
        work.settle(_SETTLE)
        before = world.stats
        ours = Candidate(work.decode, work.prepare)
        times = time_in_turns(
            work.peers() | {options.device.type: ours},
            options.num_steps,
            device=options.device,
            num_warmups=_WARMUPS,
        )
        after = world.stats
        missed = after.miss_pages - before.miss_pages
        selected = missed + after.hit_pages - before.hit_pages
        return Case(
            name="decode",
            params=self._params()
            | {"miss_ratio": round(missed / selected, 4)}
            | ({"left_out": f"flashinfer: {work.left_out}"} if work.left_out else {}),
            gate=gate,
            results=[Result.of(impl, seconds) for impl, seconds in times.items()],
        )

    def _check(self) -> None:
        size = self.page_size
        for flag, tokens in (("--context", self.context), ("--budget", self.budget)):
            if tokens % size or tokens < 4 * size:
                raise ConfigError(
                    f"{flag}: got {tokens}, expected a multiple of --page-size {size}, "
                    f"{4 * size} or more"
                )
        if not 0 <= self.misses < 1:
            raise ConfigError(f"--misses: got {self.misses}, expected 0 or more and less than 1")
        if self.budget > self.context:
            raise ConfigError(f"--budget: got {self.budget}, expected at most the context")

    def _world(self, options: Options, room: int) -> RandomRequests:
        room = -(-room // self.page_size) * self.page_size
        row_tokens = 2 * self.budget if self.misses else self.context + room
        return RandomRequests(
            kv=self.kv,
            batch=self.batch,
            context=self.context,
            budget=self.budget,
            row_tokens=row_tokens,
            room=room,
            device=options.device,
            seed=options.seed,
        )

    def _params(self) -> dict[str, Any]:
        return self.reported("context", "budget", "batch") | {"algorithm": "quest"}


class _Work:
    """Queries that drift from step to step, and the coordinator's answers."""

    def __init__(self, world: RandomRequests, misses: float) -> None:
        self._world, self._misses = world, misses
        #: Why FlashInfer, which needs CUDA, is not among the peers.
        self.left_out = ""
        kv = world.kv
        shape = (kv.num_layers, world.batch, kv.num_q_heads, kv.head_dim)
        self._queries = torch.randn(shape, device=world.device)
        self._drift = 0.3 if misses else 1.0
        self._layer = kv.num_layers - 1
        self._kv = world.new_token()

    @property
    def query(self) -> Tensor:
        return self._queries[self._layer].to(self._world.kv.dtype)

    def prepare(self, step: int) -> None:
        """Go on to the next layer, or to the first one of the next token."""
        world = self._world
        self._layer = (self._layer + 1) % world.kv.num_layers
        if self._layer:
            return
        world.coordinator.forward_end()
        world.begin_token()
        self._kv = world.new_token()
        fresh = torch.randn_like(self._queries)
        self._queries = (1 - self._drift**2) ** 0.5 * self._queries + self._drift * fresh

    def decode(self, step: int) -> Tensor:
        return self._world.coordinator.attention(self._layer, self.query, *self._kv)

    def settle(self, num_tokens: int) -> None:
        """Decode until as much is missed as wanted; queries that turn faster miss more."""
        layers = self._world.kv.num_layers
        for token in range(num_tokens):
            before = self._world.stats
            for step in range(layers):
                self.prepare(step)
                self.decode(step)
            after = self._world.stats
            missed = after.miss_pages - before.miss_pages
            got = missed / (missed + after.hit_pages - before.hit_pages)
            if self._misses and token >= 4:
                self._drift *= min(max((self._misses / max(got, 1e-3)) ** 0.5, 0.8), 1.25)
                self._drift = min(self._drift, 1.0)

    def agrees(self) -> bool:
        """One token through all layers: attention over exactly the pages that were selected."""
        tolerance = 2e-5 if self._world.kv.dtype == torch.float32 else 2e-2
        for step in range(self._world.kv.num_layers):
            self.prepare(step)
            out = self.decode(step).double().cpu()
            expected = self._world.attend(self._layer, self.query)
            if not torch.allclose(out, expected, atol=tolerance, rtol=tolerance):
                return False
        return True

    def peers(self) -> dict[str, Candidate]:
        """Dense attention over contiguous K/V: PyTorch's, as it is fastest, and SGLang's."""
        world = self._world
        contexts = [world.contiguous(layer) for layer in range(world.kv.num_layers)]
        scale, queries = world.policy.scale, self._queries.to(world.kv.dtype)

        def sdpa(step: int) -> Tensor:
            layer = step % len(contexts)
            k, v = contexts[layer]
            # A group's queries as one sequence: as fast as its heads one by one, or faster.
            q = queries[layer].unflatten(1, (k.shape[1], -1))
            return scaled_dot_product_attention(q, k, v, scale=scale)

        lens = torch.full((world.batch,), world.context)
        peers = {"sdpa": Candidate(sdpa)}
        native = [torch_native_decode(kv, lens, scale) for kv in contexts]
        by_layer = [decode for decode in native if decode is not None]
        if by_layer and world.device.type == "cpu":

            def torch_native(step: int) -> Tensor:
                layer = step % len(by_layer)
                return by_layer[layer](queries[layer])

            peers["torch_native"] = Candidate(torch_native)
        if world.device.type == "cuda":
            page = world.kv.page_size
            heads = world.kv.num_q_heads
            dense: list[Callable[[Tensor], Tensor]] = []

            def agrees() -> bool:
                dense.extend(flashinfer_decode(kv, heads, page, scale) for kv in contexts)
                got, expected = dense[0](queries[0]), sdpa(0).flatten(1, 2)
                return torch.allclose(got.float(), expected.float(), atol=2e-2, rtol=2e-2)

            self.left_out = reason_to_leave_out(agrees)
            if not self.left_out:
                peers["flashinfer"] = Candidate(
                    lambda step: dense[step % len(dense)](queries[step % len(dense)])
                )
        return peers
