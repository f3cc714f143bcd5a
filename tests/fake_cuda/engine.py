"""An engine on the fake device, with the shapes of a real model and a context of 128k tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hisparse.adapters import ADAPTERS, Attended, TritonAdapter
from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.cache import HostKVPool, PoolSizes
from hisparse.cache.formats import format_of
from hisparse.config import HiSparseConfig
from hisparse.engine.batches import DecodeBatch, PrefillBatch, StaticBatch
from hisparse.engine.build import build, make_policy
from hisparse.engine.capabilities import resolve_settings
from hisparse.engine.prefill import PrefillChunk
from hisparse.engine.verify import VerifyBatch
from hisparse.testing.simulator import simulated_inputs
from hisparse.types import AttentionRule, KVSpec, SelectionScope
from tests import shapes
from tests.fake_cuda.device import CUDA
from tests.fake_cuda.launches import Launches

#: Llama-3.1-8B, and DeepSeek-V3's latent attention, with an indexer's keys of V3.2.
LLAMA = replace(shapes.LLAMA, num_layers=2)
MLA = KVSpec(
    num_layers=2,
    num_q_heads=128,
    num_kv_heads=1,
    head_dim=576,
    v_head_dim=512,
    dtype=torch.bfloat16,
    page_size=64,
    attention="MLA",
    index_head_dim=128,
)
#: Gemma-2-9B's heads.
GEMMA = replace(LLAMA, num_q_heads=16, num_kv_heads=8, head_dim=256, v_head_dim=256)
#: Qwen4-Exp's heads, and its indexer's blocks and keys.
QWEN4 = replace(
    LLAMA, num_q_heads=24, num_kv_heads=2, head_dim=256, v_head_dim=256, page_size=4,
    index_head_dim=128,
)  # fmt: skip
#: MiniMax-M3's heads, and its indexer's blocks and keys.
MINIMAX = replace(LLAMA, num_q_heads=64, num_kv_heads=4, page_size=128, index_head_dim=128)
#: MiniCPM4.1's heads and blocks.
MINICPM = replace(LLAMA, num_q_heads=32, num_kv_heads=2, page_size=64, index_head_dim=128)
MODELS = {"GQA": LLAMA, "MLA": MLA}
#: By the indexer that an algorithm asks; "": none.
KINDS = {
    "": tuple(MODELS), "dsa": ("MLA",), "qsa": ("Qwen4-Exp",), "msa": ("MiniMax-M3",),
    "infllm": ("MiniCPM",),
}  # fmt: skip
#: Compiled for, besides.
MORE_MODELS = {
    "Gemma 2": GEMMA, "Qwen4-Exp": QWEN4, "MiniMax-M3": MINIMAX, "MiniCPM": MINICPM
}  # fmt: skip
CONTEXT = 131072
#: Hi of DeepSeek-V3.2.
INDEXER_HEADS = 64
#: The layer whose launches are counted: not the first, which may make what all layers share.
LAYER = 1


class Ruled(TritonAdapter):
    """Attends by a rule of its own, whatever the model's is."""

    def __init__(self, rule: AttentionRule) -> None:
        self._rule = rule

    def attend(self, *arguments: Any) -> Attended:
        return super().attend(*arguments[:-1], self._rule)

    def attend_prefill(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> Attended:
        return super().attend_prefill(q, k, v, self._rule, **options)


@dataclass
class FakeEngine:
    """Runs prefills and decode steps of one engine, all requests alike.

    Attributes:
        launches: where launches are counted.
        algorithm: selects pages.
        spec: shapes of the model.
        scope: selection scope.
        batch: requests of a decode step.
        context: tokens of a request, and of the longest sequence.
        settings: more settings, by key of the configuration.
        rule: how layers attend; None: only by the scale.
        adapter: attends, unless there is a rule.
        sinks: whether heads have sinks.
        ranks: that share latents, and select for the query heads of all.
    """

    launches: Launches
    algorithm: BaseSparseAlgorithm
    spec: KVSpec
    scope: SelectionScope
    batch: int = 4
    context: int = CONTEXT
    settings: Mapping[str, Any] = field(default_factory=dict)
    rule: AttentionRule | None = None
    adapter: str = "triton"
    sinks: bool = False
    ranks: int = 1

    def __post_init__(self) -> None:
        size = self.spec.page_size
        config = HiSparseConfig(
            **{"page_size": size, "budget": 2048, "device_buffer_size": 4096}
            | (self.settings or {})
        )
        self.policy = make_policy(config, self.algorithm, self.spec, 0.1, self.scope)
        rows = (self.batch + 1) * self.policy.heads
        self.pages = self.context // size
        host = HostKVPool(
            self.spec, self.batch * self.pages + 1, config.host_layout or "page_head", pin=True
        )
        pools = PoolSizes(
            num_slots=self.batch + 1,
            device_pages=rows * (8192 // size + 1),
            min_row_pages=config.min_row_tokens // size,
            max_row_pages=8192 // size,
            context_pages=self.pages,
            staging_pages=1024 // size,
        )
        self.coordinator = build(
            resolve_settings(config, self.spec, self.scope),
            self.algorithm,
            self.policy,
            ADAPTERS.get(self.adapter)() if self.rule is None else Ruled(self.rule),
            host=host,
            sizes=pools,
            device=CUDA,
            gather_queries=None if self.ranks == 1 else lambda q: q.repeat(1, self.ranks, 1),
        )
        for slot in range(1, self.batch + 1):
            self.coordinator.on_request_begin(slot)

    def prefill(self, tokens: int = 120, start: int = 2500) -> list[Tensor]:
        """A chunk of ``tokens`` after a prefix of ``start``, in request slot 1."""
        with self.launches.forward("a prefill"):
            pages = torch.zeros(
                -(-(start + tokens) // self.spec.page_size), dtype=torch.int32, device=CUDA
            )
            chunk = PrefillChunk(
                slot=1, start=start, length=tokens, offset=0, host_pages=pages, is_last=True
            )
            host_slots = torch.zeros(tokens, dtype=torch.int64, device=CUDA)
            self.coordinator.forward_begin(PrefillBatch(chunks=[chunk], host_slots=host_slots))
            return self._layers(tokens)

    def decode(self, length: int | None = None) -> list[Tensor]:
        """An eager step; the tail pages are full after it if ``length`` is a multiple of S."""
        with self.launches.forward("an eager step"):
            self.coordinator.forward_begin(self._batch(length or self.context - 1))
            return self._layers(self.batch)

    def captured(self, *, warm_up: bool = False) -> list[Tensor]:
        """A step as a CUDA graph captures it, or as SGLang runs it before."""
        batch = self._batch(self.context - 1)
        static = StaticBatch(self.batch, self.pages, self.spec.page_size, CUDA)
        assert batch.begin_replay(self.coordinator)
        static.load(batch)
        with self.launches.forward("a captured step", captured=not warm_up):
            self.coordinator.forward_begin(static.first(self.batch))
            return self._layers(self.batch)

    def verify(self, length: int, drafts: int, accepted: Sequence[int]) -> None:
        """Verify ``drafts`` tokens of each request; keep those up to place ``accepted [B]``."""
        batch, shape = self._batch(length), (self.batch, drafts)
        verification = VerifyBatch(
            slots=batch.slots,
            slots_cpu=batch.slots_cpu,
            seq_lens_cpu=batch.seq_lens_cpu,
            chain_lengths=np.full(self.batch, drafts),
            host_slots=torch.zeros(shape, dtype=torch.int64, device=CUDA),
            host_page_table=batch.host_page_table,
        )
        with self.launches.forward("a verification"):
            self.coordinator.forward_begin(verification)
            self._layers(verification.num_tokens)
            self.coordinator.accept_drafts(np.array(accepted))

    def replay(self, length: int, count: int | None = None) -> bool:
        """The host's part of a captured step of the first ``count`` requests: whether it can be."""
        batch = self._batch(length, count)
        with self.launches.forward("a replay"):
            can_replay = batch.begin_replay(self.coordinator)
            StaticBatch(self.batch, self.pages, self.spec.page_size, CUDA).load(batch)
        return can_replay

    def _batch(self, length: int, count: int | None = None) -> DecodeBatch:
        count = count or self.batch

        def rows(value: int) -> Tensor:
            return torch.full((count,), value, dtype=torch.int64, device=CUDA)

        return DecodeBatch(
            slots=rows(1),
            slots_cpu=np.arange(1, count + 1),
            seq_lens=rows(length),
            seq_lens_cpu=np.full(count, length),
            host_slots=rows(1),
            host_page_table=torch.zeros(count, self.pages, dtype=torch.int32, device=CUDA),
        )

    def _layers(self, tokens: int) -> list[Tensor]:
        spec, kind = self.spec, {"dtype": self.spec.dtype, "device": CUDA}
        outs = []
        sinks = torch.empty(spec.num_q_heads, **kind) if self.sinks else None
        for layer in range(spec.num_layers):
            q = torch.empty(tokens, spec.num_q_heads, spec.head_dim, **kind)
            k = torch.empty(tokens, spec.num_kv_heads, spec.head_dim, **kind)
            v = format_of(spec).values_of(k, torch.empty_like(k))
            width = spec.index_head_dim
            of_model = {"msa": spec.num_kv_heads, "infllm": spec.num_q_heads}
            heads = of_model.get(self.algorithm.indexer, INDEXER_HEADS)
            indexer = simulated_inputs(
                torch.empty(tokens, heads, width, **kind),
                torch.empty(tokens, width, **kind),
                torch.empty(tokens, heads, **kind),
            )
            with self.launches.layer(layer):
                given = indexer if self.algorithm.indexer else None
                out = self.coordinator.attention(layer, q, k, v, given, sinks)
            assert out.device == CUDA and out.dtype == spec.dtype
            assert out.shape == (tokens, spec.num_q_heads, spec.v_head_dim)
            outs.append(out)
        self.coordinator.forward_end()
        return outs


def model(name: str, page_size: int | None = None, **changes: Any) -> KVSpec:
    """A model of ``MODELS`` or ``MORE_MODELS``, with another page size or other fields."""
    spec = (MODELS | MORE_MODELS)[name]
    return replace(spec, page_size=page_size or spec.page_size, **changes)
