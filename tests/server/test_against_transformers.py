"""Families whose attention ``torch_native`` does not compute, and hybrids, against transformers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import hybrids
import pytest
import torch
from harness import Server
from hybrids import HYBRIDS
from parts import MORE, few
from tiny_models import HYBRID_LAYERS, INDEX_TOP_K, tiny_model
from workload import tokens

pytestmark = MORE

NEW_TOKENS = 24
_PREFIX = tokens(300, seed=41)
PROMPTS = [tokens(90, seed=40), _PREFIX + tokens(133, seed=42), _PREFIX + tokens(20, seed=43)]
_FLAGS = ("--max-total-tokens", "20000", "--chunked-prefill-size", "256")
_MEMORY = {"host_memory": "1GiB", "device_memory": "600MB"}
_ROOMY = _MEMORY | {"budget": 8192}
_DSA = _MEMORY | {
    "algorithm": "dsa",
    "algorithm_config": {"index_dtype": "float32"},
    "page_size": 1,
    "num_sink_pages": 0,
    "num_recent_pages": 0,
    "budget": INDEX_TOP_K,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "exaone4": _ROOMY,
    "glm4_moe_lite": _ROOMY,
    "glm_moe_dsa": _DSA,
    **dict.fromkeys(HYBRIDS, _ROOMY),
}


def serve(kind: str, log_dir: Path, config: dict[str, Any], *flags: str) -> Server:
    """A server. SGLang keeps no states of LFM2 in the radix cache, but in pages of one token."""
    if kind in HYBRIDS:
        flags += ("--max-running-requests", "4", *hybrids.FLAGS)
    if kind == "lfm2":
        flags += ("--disable-radix-cache",)
    log = log_dir / f"transformers-{kind}-{config['budget']}.log"
    options: dict[str, Any] = {"python_path": hybrids.python_path(log_dir / "plugin")}
    options |= {"config": config, "env": hybrids.ENV}
    return Server(tiny_model(kind), log, *_FLAGS, *flags, **options)


def of_transformers(kind: str) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(
        tiny_model(kind), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found = []
    for prompt in PROMPTS:
        out = net.generate(
            torch.tensor([prompt]),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("kind", few(CONFIGS, "qwen3_next"))
def test_served_tokens_are_those_of_transformers(kind: str, log_dir: Path) -> None:
    dense = of_transformers(kind)
    assert all(len(set(ids)) > 5 for ids in dense), "continuations that repeat show little"
    with serve(kind, log_dir, CONFIGS[kind]) as server:
        assert [a.ids for a in server.generate_many(PROMPTS, NEW_TOKENS)] == dense
        aborted = server.abort_after(PROMPTS[1], num_tokens=5, max_new_tokens=1000)
        assert aborted[:NEW_TOKENS] == dense[1][: len(aborted)]
        again = server.generate_many(PROMPTS, NEW_TOKENS)
        assert [a.ids for a in again] == dense
        assert (min(a.cached for a in again[1:]) >= 256) == (kind != "lfm2")


@pytest.mark.modes
@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_hybrid_with_a_small_budget_keeps_requests_apart(kind: str, log_dir: Path) -> None:
    config = _MEMORY | {"budget": 80, "checked": True, "dense_layers": [HYBRID_LAYERS[1]]}
    config |= {"layer_metrics": True}
    with serve(kind, log_dir, config) as server:
        together = server.generate_many(PROMPTS, NEW_TOKENS, top_logprobs=1)
        alone = [server.generate(prompt, NEW_TOKENS, top_logprobs=1) for prompt in PROMPTS]
        assert [x.ids for x in together] == [x.ids for x in alone]
        assert all(math.isfinite(value) for x in alone for value in x.logprobs)
        assert "the layers that attend are 1, 3;" in server.log()
        (selections,) = server.counted("selections")
        assert selections > 0


@pytest.mark.modes
@pytest.mark.parametrize("flags", [(), ("--enable-mixed-chunk",)], ids=["chunks", "mixed"])
def test_retracted_requests_of_a_hybrid_get_their_tokens(
    flags: tuple[str, ...], log_dir: Path
) -> None:
    """SGLang frees and computes again the states of other layers with them."""
    prompts, count = [tokens(60, seed=n) for n in range(50, 54)], 260
    flags += ("--max-total-tokens", "1088")
    with serve("qwen3_next", log_dir, _MEMORY | {"budget": 512}, *flags) as server:
        # Of requests that may end early SGLang admits more than fit.
        together = server.generate_many(prompts, count, delay_s=0.1, ignore_eos=False)
        server.flush_cache()
        alone = [server.generate(prompt, count) for prompt in prompts]
        assert sum(answer.retractions for answer in together) > 0
        assert [x.ids for x in together] == [x.ids for x in alone]
