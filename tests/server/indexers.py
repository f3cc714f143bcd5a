"""Models that were trained to attend what an indexer of their own selects, and how to serve them.

The layers of Qwen4-Exp that do not attend run with the stand-ins of ``scripts/torch_kernels.py``,
in PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import hybrids
import torch
from harness import Server
from hugging_face import greedy, load
from settings import CHECKED, DSA, INFLLM, MSA, MSA_FLAGS, QSA
from tiny_models import (
    HYBRID_LAYERS,
    INDEX_TOP_K,
    KV_HEADS,
    LAYERS,
    MSA_BUDGET,
    QSA_BUDGET,
    tiny_model,
)
from transformers import LlamaForCausalLM
from workload import tokens

from tests.infllm import attend_as

NEW_TOKENS = 24
#: Tokens that each of the models selects.
BUDGET = INDEX_TOP_K
assert {BUDGET} == {QSA_BUDGET, MSA_BUDGET}
_SHARED = tokens(4 * BUDGET, seed=60)
#: Four to eight times the budget; two of them share a prefix.
PROMPTS = [
    *(tokens(n, seed=n) for n in (257, 301, 346, 391, 440, 488)),
    *(_SHARED + tokens(n, seed=n) for n in (31, 90)),
]
_FLAGS = ("--chunked-prefill-size", "128", "--max-running-requests", "4")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of ``tiny_models`` with an indexer.

    Attributes:
        config: its settings.
        selecting, sparse, dense: rows of a request that select, that attend a selection, and that
            attend all, each of a layer and a head.
        flags: of its servers.
        names: what transformers calls its weights.
        is_hybrid: whether it has layers that do not attend.
    """

    config: Mapping[str, Any]
    selecting: int
    sparse: int
    dense: int = 0
    flags: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    is_hybrid: bool = False

    @property
    def page(self) -> int:
        """Tokens of a block."""
        return int(self.config["page_size"])


_DSA = CHECKED | DSA
KINDS = {
    "deepseek_v32": Kind(config=_DSA, selecting=LAYERS, sparse=LAYERS),
    # The second layer attends what the first one selected.
    "glm_moe_dsa": Kind(config=_DSA, selecting=LAYERS - 1, sparse=LAYERS),
    "minimax_m3": Kind(
        config=CHECKED | MSA,
        selecting=(LAYERS - 1) * KV_HEADS,
        sparse=(LAYERS - 1) * KV_HEADS,
        dense=KV_HEADS,
        flags=MSA_FLAGS,
        names={r"\.index_(\w+)\.": r".indexer.\1."},
    ),
    "minicpm": Kind(config=CHECKED | INFLLM, selecting=LAYERS * KV_HEADS, sparse=LAYERS * KV_HEADS),
    "qwen4_exp": Kind(
        config=CHECKED | QSA,
        selecting=len(HYBRID_LAYERS),
        sparse=len(HYBRID_LAYERS),
        is_hybrid=True,
    ),
}


def serve(log_dir: Path, name: str, case: str, *flags: str, **options: Any) -> Server:
    """A server of a kind; ``case`` is part of its log's name."""
    kind, env = KINDS[name], {"TORCHDYNAMO_DISABLE": "1"} | options.pop("env", {})
    flags = (*_FLAGS, "--max-total-tokens", "20000", *kind.flags, *flags)
    if kind.is_hybrid:
        flags += hybrids.FLAGS
        env = hybrids.ENV | env
        # The stand-ins have to be there before SGLang imports the model.
        options |= {"python_path": hybrids.python_path(log_dir / "plugin"), "forked": False}
    log = log_dir / f"{name}-{case}.log"
    return Server(tiny_model(name), log, *flags, **{"config": kind.config} | options, env=env)


def transformers_model(name: str) -> Any:
    """The model of transformers, in float32."""
    if name == "minicpm":
        return _llama(attend_as(sparse_config()))
    return load(tiny_model(name), key_mapping=dict(KINDS[name].names) or None)


def sparse_config() -> dict[str, int]:
    """How the tiny MiniCPM selects."""
    config = json.loads((tiny_model("minicpm") / "config.json").read_text())
    found: dict[str, int] = config["sparse_config"]
    return found


def _llama(attention: str) -> Any:
    """The tiny MiniCPM as a Llama with an attention function of transformers."""
    model = LlamaForCausalLM.from_pretrained(
        tiny_model("minicpm"), dtype=torch.float32, attn_implementation=attention
    )
    return model.eval()


def attending_all(name: str) -> Any:
    """The same, with indexers that keep all tokens."""
    if name == "minicpm":
        return _llama("eager")
    net, sizes = transformers_model(name), ("index_topk", "topk_blocks", "block_topk")
    indexers = [m.indexer for m in net.modules() if getattr(m, "indexer", None) is not None]
    for indexer in indexers:
        for size in (*sizes, "token_budget"):
            if hasattr(indexer, size):
                setattr(indexer, size, 1 << 14)
    return net


@cache
def expected_tokens(name: str) -> list[list[int]]:
    """What transformers answers to each of ``PROMPTS``."""
    net = transformers_model(name)
    found = [greedy(net, prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert all(len(set(ids)) > 5 for ids in found), "continuations that repeat show little"
    return found
