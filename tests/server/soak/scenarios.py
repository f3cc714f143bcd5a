"""What the soak serves: models, algorithms and flags, and how many of the requests each gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hybrids
from adapters import ADAPTER_FLAGS, adapter_path
from draft_models import noisy_model
from hybrids import HYBRIDS
from settings import DSA
from soak.stores import make_ledger
from tiny_models import INDEX_TOP_K, KINDS, tiny_model

from hisparse.eval.models import fetch

__all__ = ["SCENARIOS", "Scenario"]

_BUDGET = 128
#: Rows hold less than most contexts, so pages are loaded and evicted in most steps.
_SMALL = {
    "budget": _BUDGET,
    "device_buffer_size": 2 * _BUDGET,
    "max_row_capacity": 4 * _BUDGET,
    "host_memory": "1GiB",
    "device_memory": "200MB",
}
#: Every context is within the budget.
_WHOLE = {"budget": 8192, "host_memory": "1GiB", "device_memory": "600MB"}
#: Every tenth forward sends running requests back to the queue.
_RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "10"}
#: SGLang wants a CPU for each rank, or to be told.
_TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
#: As DeepSeek-V3.2 selects: single tokens, as many as the model's indexer keeps.
_DSA = DSA | {
    "max_row_capacity": 4 * INDEX_TOP_K,
    "host_memory": "1GiB",
    "device_memory": "600MB",
}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One server.

    Attributes:
        name: of the row in the report.
        model: a kind of ``tiny_models``, or a model that ``hisparse eval`` fetches.
        config: value of ``--hisparse-config``.
        flags: more of SGLang's flags.
        env: environment variables.
        part: share of all requests.
        whole: whether the budget holds every context. Only then has a request that was retracted
            the answer of one that was not: it computes anew what it had generated, as a prompt.
        longest: tokens of the longest prompt.
        pair: whether a prefill server and a decode server take the requests, over Mooncake. One
            server alone gives the answers that theirs are compared with.
        store: size of a store below host memory; None: there is none. A store has two servers, one
            after the other: the second reads what the first left when it was killed. A third one,
            without a store, gives the answers that theirs are compared with.
        adapters: number of LoRA adapters; requests of the model and of each of them take turns.
            There are two names for more adapters, so that they are unloaded and loaded all the
            time, each time another one in the same folder.
        drafted: whether the model drafts for itself, with noise in its weights.
        lead: a token counts as equal if the best one led the second best by less than this, in
            logprob, when the request ran alone: sums of another order may choose either.
    """

    name: str
    model: str
    config: Mapping[str, Any]
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    part: float
    whole: bool = False
    longest: int = 3000
    pair: bool = False
    store: str | None = None
    adapters: int = 0
    drafted: bool = False
    lead: float = 1e-3

    @property
    def folder(self) -> Path:
        """The model's folder, made or fetched if needed."""
        return tiny_model(self.model) if self.model in KINDS else fetch(self.model)

    @property
    def retracts(self) -> bool:
        """Whether running requests are sent back to the queue."""
        return _RETRACT.items() <= self.env.items()

    @property
    def command_line(self) -> tuple[str, ...]:
        """The flags, with those of a hybrid, of a draft model or of adapters."""
        flags = self.flags
        if self.model in HYBRIDS:
            flags += hybrids.FLAGS
        if self.adapters:
            flags += ADAPTER_FLAGS
        if self.drafted:
            flags += ("--speculative-draft-model-path", str(noisy_model(self.model)))
            flags += ("--speculative-algorithm", "STANDALONE")
        return flags

    def server_options(self, folder: Path) -> dict[str, Any]:
        """Environment variables and module path of a server; its plug-ins go into ``folder``."""
        if self.model in HYBRIDS:
            return {"env": hybrids.ENV | self.env, "python_path": hybrids.python_path(folder)}
        path = adapter_path(folder) if self.adapters else []
        path += [make_ledger(folder)] if self.store else []
        return {"env": {"TORCHDYNAMO_DISABLE": "1"} | self.env, "python_path": path}


_CHUNKS = ("--chunked-prefill-size", "256")

#: Later work adds rows here.
SCENARIOS = (
    Scenario(
        name="whole context, retractions",
        model="llama",
        config=_WHOLE | {"algorithm": "quest"},
        flags=_CHUNKS,
        env=_RETRACT,
        whole=True,
        part=0.04,
    ),
    Scenario(
        name="whole context, a draft model, retractions",
        model="llama",
        config=_WHOLE,
        flags=_CHUNKS,
        env=_RETRACT,
        whole=True,
        drafted=True,
        part=0.02,
    ),
    Scenario(
        name="sketch",
        model="llama",
        config=_SMALL,
        flags=_CHUNKS,
        part=0.04,
    ),
    Scenario(
        name="sketch, retractions",
        model="llama",
        config=_SMALL,
        env=_RETRACT,
        part=0.04,
    ),
    Scenario(
        name="quest, prefetch",
        model="qwen2",
        config=_SMALL | {"algorithm": "quest", "prefetch": {"min_cosine": 0.5}},
        flags=_CHUNKS,
        part=0.04,
    ),
    Scenario(
        name="sketch, mixed chunk",
        model="llama",
        config=_SMALL,
        flags=("--enable-mixed-chunk", *_CHUNKS),
        part=0.04,
    ),
    Scenario(
        name="replicas, retractions",
        model="llama",
        config=_WHOLE,
        flags=("--dp-size", "2", *_CHUNKS),
        env=_RETRACT | _TWO_RANKS,
        whole=True,
        part=0.06,
    ),
    Scenario(
        name="sketch, n-gram drafts",
        model="llama",
        config=_SMALL,
        flags=("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6", *_CHUNKS),
        part=0.04,
    ),
    Scenario(
        name="attention replicas",
        model="deepseek_v2",
        config=_WHOLE,
        flags=("--tp-size", "2", "--attn-dp-size", "2", *_CHUNKS),
        env=_RETRACT | _TWO_RANKS,
        whole=True,
        part=0.04,
    ),
    Scenario(
        name="pipeline",
        model="llama",
        config=_WHOLE,
        flags=("--pp-size", "2", *_CHUNKS),
        env=_RETRACT | _TWO_RANKS,
        whole=True,
        part=0.04,
    ),
    Scenario(
        name="pair, retractions",
        model="llama",
        # Requests on their way have rows too.
        config=_WHOLE | {"budget": 4096, "device_buffer_size": 4096},
        flags=_CHUNKS,
        env=_RETRACT,
        whole=True,
        pair=True,
        part=0.02,
    ),
    Scenario(
        name="pair, sketch",
        model="llama",
        config=_SMALL,
        flags=_CHUNKS,
        pair=True,
        part=0.02,
    ),
    Scenario(
        name="whole context, store",
        model="llama",
        config=_WHOLE,
        flags=_CHUNKS,
        # The prompts of a soak take some 50 MiB, and here their answers are stored too.
        store="32MiB",
        whole=True,
        part=0.04,
    ),
    Scenario(
        name="sketch, store",
        model="llama",
        config=_SMALL,
        flags=_CHUNKS,
        store="32MiB",
        part=0.04,
    ),
    Scenario(
        name="sketch, store, adapters, two ranks",
        model="llama",
        config=_SMALL,
        flags=("--tp-size", "2", *_CHUNKS),
        env=_TWO_RANKS,
        store="32MiB",
        adapters=3,
        part=0.04,
    ),
    Scenario(
        name="whole context, store, adapters, retractions",
        model="llama",
        config=_WHOLE,
        flags=_CHUNKS,
        env=_RETRACT,
        store="32MiB",
        adapters=3,
        whole=True,
        part=0.04,
    ),
    Scenario(
        name="dipr",
        model="llama",
        config=_SMALL
        | {
            "algorithm": "dipr",
            "algorithm_config": {"alpha": 0.5, "index": "fine", "capacity_threshold": 8},
        },
        part=0.04,
    ),
    Scenario(
        name="sketch, fp8",
        model="llama",
        config=_SMALL,
        flags=("--kv-cache-dtype", "fp8_e4m3", *_CHUNKS),
        # Eight bits magnify float32 noise.
        lead=0.2,
        part=0.04,
    ),
    Scenario(
        name="sketch, MLA",
        model="deepseek_v2",
        config=_SMALL,
        flags=_CHUNKS,
        part=0.05,
    ),
    Scenario(
        name="sketch, MLA, fp8",
        model="deepseek_v2",
        config=_SMALL,
        flags=("--kv-cache-dtype", "fp8_e4m3", *_CHUNKS),
        env=_RETRACT,
        lead=0.2,
        part=0.03,
    ),
    Scenario(
        name="dsa",
        model="deepseek_v32",
        config=_DSA,
        flags=_CHUNKS,
        part=0.04,
    ),
    Scenario(
        name="sketch, windows, sinks",
        model="gpt_oss",
        config=_SMALL,
        flags=_CHUNKS,
        env=_RETRACT,
        part=0.02,
    ),
    Scenario(
        name="transformers' code, whole context, retractions",
        model="smollm3",
        config=_WHOLE,
        flags=("--model-impl", "transformers", *_CHUNKS),
        env=_RETRACT,
        whole=True,
        part=0.02,
    ),
    Scenario(
        name="hybrid, whole context, retractions",
        model="qwen3_next",
        config=_WHOLE,
        flags=_CHUNKS,
        env=_RETRACT,
        whole=True,
        part=0.03,
    ),
    Scenario(
        name="sketch, hybrid",
        model="kimi_linear",
        config=_SMALL,
        flags=_CHUNKS,
        env=_RETRACT,
        part=0.03,
    ),
    Scenario(
        name="windows, whole context, retractions",
        model="gemma3",
        config=_WHOLE,
        flags=_CHUNKS,
        env=_RETRACT,
        whole=True,
        part=0.03,
    ),
    Scenario(
        name="sketch, windows, capped logits",
        model="gemma2",
        config=_SMALL,
        flags=_CHUNKS,
        env=_RETRACT,
        part=0.03,
    ),
    Scenario(
        name="sketch, SmolLM2",
        model="smollm2-135m",
        # Pools that the first requests fill, so that memory does not grow by their first use.
        config=_SMALL | {"device_memory": "600MB"},
        flags=("--max-total-tokens", "12000"),
        longest=800,
        part=0.04,
    ),
)
