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
from settings import DSA, INFLLM, MEMORY, MSA, MSA_FLAGS, QSA, ROOMY, SMALL_ROWS
from soak.stores import make_ledger
from tiny_models import INDEX_TOP_K, INFLLM_DENSE, KINDS, MSA_BUDGET, QSA_BUDGET, tiny_model

from hisparse.eval.models import fetch

_SMALL = SMALL_ROWS
#: Every context is within the budget.
_WHOLE = ROOMY
#: Every tenth forward sends running requests back to the queue.
_RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "10"}
#: Some pages are in range, not all that a row holds.
_RANGE = {"algorithm": "dipr", "algorithm_config": {"alpha": 0.5}}
#: SGLang wants a CPU for each rank, or to be told.
_TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
_CHUNKS = ("--chunked-prefill-size", "256")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One server.

    Attributes:
        name: of the row in the report.
        model: a kind of ``tiny_models``, or a model that ``hisparse eval`` fetches.
        whole: whether the budget holds every context, or the model selects in prompts too. Only
            then has a request that was retracted the answer of one that was not: it computes anew
            what it had generated, as a prompt.
        config: what else ``--hisparse-config`` has.
        flags: more of SGLang's flags.
        chunks: whether prompts are cut into chunks.
        retracts: whether running requests are sent back to the queue.
        env: environment variables.
        part: share of all requests.
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
    model: str = "llama"
    whole: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    chunks: bool = True
    retracts: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    part: float = 0.04
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
    def _keeps_states(self) -> bool:
        return self.model in (*HYBRIDS, "qwen4_exp")

    @property
    def settings(self) -> dict[str, Any]:
        """Value of ``--hisparse-config``."""
        return (_WHOLE if self.whole else _SMALL) | self.config

    @property
    def command_line(self) -> tuple[str, ...]:
        """The flags, with those of chunks, of a hybrid, of a draft model or of adapters."""
        flags = self.flags + (_CHUNKS if self.chunks else ())
        if self._keeps_states:
            flags += hybrids.FLAGS
        if self.adapters:
            flags += ADAPTER_FLAGS
        if self.drafted:
            flags += ("--speculative-draft-model-path", str(noisy_model(self.model)))
            flags += ("--speculative-algorithm", "STANDALONE")
        return flags

    def server_options(self, folder: Path) -> dict[str, Any]:
        """Environment variables and module path of a server; its plug-ins go into ``folder``."""
        env = {**self.env, **(_RETRACT if self.retracts else {})}
        if self._keeps_states:
            return {"env": hybrids.ENV | env, "python_path": hybrids.python_path(folder)}
        path = adapter_path(folder) if self.adapters else []
        path += [make_ledger(folder)] if self.store else []
        return {"env": {"TORCHDYNAMO_DISABLE": "1"} | env, "python_path": path}


#: Later work adds rows here.
SCENARIOS = (
    Scenario(
        name="whole context, retractions", whole=True, config={"algorithm": "quest"}, retracts=True
    ),
    Scenario(
        name="whole context, a draft model, retractions",
        whole=True,
        retracts=True,
        drafted=True,
        part=0.02,
    ),
    Scenario(name="sketch"),
    Scenario(name="sketch, retractions", chunks=False, retracts=True),
    Scenario(
        name="attention in host memory, retractions",
        config={"miss": "host", "dense_layers": [1]},
        retracts=True,
    ),
    Scenario(name="quest", model="qwen2", config={"algorithm": "quest"}),
    Scenario(name="sketch, mixed chunk", flags=("--enable-mixed-chunk",)),
    Scenario(
        name="replicas, retractions",
        whole=True,
        flags=("--dp-size", "2"),
        retracts=True,
        env=_TWO_RANKS,
        part=0.06,
    ),
    Scenario(
        name="sketch, n-gram drafts",
        flags=("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6"),
    ),
    Scenario(
        name="attention replicas",
        model="deepseek_v2",
        whole=True,
        flags=("--tp-size", "2", "--attn-dp-size", "2"),
        retracts=True,
        env=_TWO_RANKS,
    ),
    Scenario(name="pipeline", whole=True, flags=("--pp-size", "2"), retracts=True, env=_TWO_RANKS),
    Scenario(
        name="pair, retractions",
        whole=True,
        # Requests on their way have rows too.
        config={"budget": 4096, "device_buffer_size": 4096},
        retracts=True,
        pair=True,
        part=0.02,
    ),
    Scenario(name="pair, sketch", pair=True, part=0.02),
    # The prompts of a soak take some 50 MiB. With a budget of every context answers are stored too.
    Scenario(name="whole context, store", whole=True, store="32MiB"),
    Scenario(name="sketch, store", store="32MiB"),
    Scenario(
        name="sketch, store, adapters, two ranks",
        flags=("--tp-size", "2"),
        env=_TWO_RANKS,
        store="32MiB",
        adapters=3,
    ),
    Scenario(
        name="whole context, store, adapters, retractions",
        whole=True,
        retracts=True,
        store="32MiB",
        adapters=3,
    ),
    Scenario(name="dipr, retractions", config=_RANGE, chunks=False, retracts=True),
    Scenario(
        name="dipr, attention in host memory, retractions",
        config=_RANGE | {"miss": "host"},
        retracts=True,
    ),
    # Eight bits magnify float32 noise.
    Scenario(name="sketch, fp8", flags=("--kv-cache-dtype", "fp8_e4m3"), lead=0.2),
    Scenario(name="sketch, MLA", model="deepseek_v2", part=0.05),
    Scenario(
        name="sketch, MLA, fp8",
        model="deepseek_v2",
        flags=("--kv-cache-dtype", "fp8_e4m3"),
        retracts=True,
        lead=0.2,
        part=0.03,
    ),
    # As GLM-5 selects, in prompts too: single tokens, which some layers share.
    Scenario(
        name="dsa, retractions",
        model="glm_moe_dsa",
        whole=True,
        config=MEMORY | DSA | {"max_row_capacity": 4 * INDEX_TOP_K},
        retracts=True,
    ),
    # As Qwen4-Exp selects, in prompts too.
    Scenario(
        name="qsa, retractions",
        model="qwen4_exp",
        whole=True,
        config=MEMORY | QSA | {"max_row_capacity": 4 * QSA_BUDGET},
        retracts=True,
        part=0.03,
    ),
    Scenario(
        name="msa, retractions",
        model="minimax_m3",
        whole=True,
        config=MEMORY | MSA | {"max_row_capacity": 4 * MSA_BUDGET},
        flags=MSA_FLAGS,
        retracts=True,
        part=0.03,
    ),
    Scenario(
        name="infllm, retractions",
        model="minicpm",
        whole=True,
        config=MEMORY | INFLLM | {"max_row_capacity": 4 * INFLLM_DENSE},
        retracts=True,
        part=0.03,
    ),
    Scenario(name="sketch, windows, sinks", model="gpt_oss", retracts=True, part=0.02),
    Scenario(
        name="transformers' code, whole context, retractions",
        model="smollm3",
        whole=True,
        flags=("--model-impl", "transformers"),
        retracts=True,
        part=0.02,
    ),
    Scenario(
        name="hybrid, whole context, retractions",
        model="qwen3_next",
        whole=True,
        retracts=True,
        part=0.03,
    ),
    Scenario(name="sketch, hybrid", model="kimi_linear", retracts=True, part=0.03),
    Scenario(
        name="windows, whole context, retractions",
        model="gemma3",
        whole=True,
        retracts=True,
        part=0.03,
    ),
    Scenario(name="sketch, windows, capped logits", model="gemma2", retracts=True, part=0.03),
    Scenario(
        name="sketch, SmolLM2",
        model="smollm2-135m",
        # Pools that the first requests fill, so that memory does not grow by their first use.
        config={"device_memory": "600MB"},
        flags=("--max-total-tokens", "12000"),
        chunks=False,
        longest=800,
    ),
)
