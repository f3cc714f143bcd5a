"""Real weights: two long contexts in host memory at the same time, and windows of 512 tokens."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness import Server
from hugging_face import greedy, load
from parts import more
from transformers import AutoTokenizer

from hisparse.demo.document import Fact, make_prompt
from hisparse.eval.models import fetch
from hisparse.eval.texts import read_text
from hisparse.transformers import disable, enable

BUFFER = 1024
#: Two documents that differ from the depth of the fact on.
FACTS = [("harbour", "BLUE HERRING", 0.8), ("castle", "GREEN LANTERN", 0.95)]
POOL = 10 * len(FACTS) * BUFFER


@more
@pytest.mark.slow
def test_facts_in_two_contexts_are_found_from_small_device_buffers(log_dir: Path) -> None:
    model = fetch("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(model)
    facts = [
        Fact(
            sentence=f"The password of the {gate} gate is {word}.",
            question=f"What is the password of the {gate} gate?",
            answer=word,
        )
        for gate, word, _ in FACTS
    ]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": make_prompt(fact, depth)}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for fact, (_, _, depth) in zip(facts, FACTS, strict=True)
    ]
    assert min(map(len, prompts)) >= 6900
    config = {
        "budget": 512,
        "device_buffer_size": BUFFER,
        "max_row_capacity": BUFFER,
        "host_memory": "2GiB",
        "device_memory": "1GiB",
        "staging_bytes": 1 << 23,
        "selection_scope": "kv_head",
    }
    flags = ("--max-total-tokens", str(POOL), "--max-running-requests", str(len(FACTS)))
    with Server(model, log_dir / "long-context.log", *flags, config=config) as server:
        for fact, answer in zip(facts, server.generate_many(prompts, 24), strict=True):
            assert answer.retractions == 0
            assert fact.is_found_in(tokenizer.decode(answer.ids))
        metrics = server.metrics()
    # Both lie in host memory; the device has the buffers of three KV heads each.
    assert metrics["hisparse:host_tokens_total"] == POOL
    assert metrics["hisparse:device_tokens_total"] == len(FACTS) * 3 * BUFFER
    hits, misses = metrics["hisparse:hit_pages"], metrics["hisparse:miss_pages"]
    assert 0 < misses < hits
    assert metrics["hisparse:decode_read_bytes"] == misses * 16 * 2 * 64 * 4
    assert metrics["hisparse:hit_ratio"] == pytest.approx(hits / (hits + misses))


LENGTHS = [4096, 8192]


@pytest.mark.modes
def test_gemma_3_gives_the_tokens_of_transformers(log_dir: Path) -> None:
    """Gemma 3 270M: 15 of 18 layers have windows. The budget is the context, or a small one."""
    folder, count = fetch("gemma3-270m"), 32
    ids = AutoTokenizer.from_pretrained(folder)(read_text("moby_dick")).input_ids
    prompts = [ids[:length] for length in LENGTHS]
    net: Any = load(folder)
    dense = [greedy(net, prompt, count) for prompt in prompts]
    try:
        cache = enable(net, budget=16384, max_length=8300)
        assert cache.coordinator.policy.kv.full_layers == (5, 11, 17)
        for prompt, right in zip(prompts, dense, strict=True):
            cache.reset()
            assert greedy(net, prompt, count, past_key_values=cache) == right
    finally:
        disable(net)
    flags = ("--max-total-tokens", "20000", "--chunked-prefill-size", "2048")
    start = partial(Server, folder, log_dir / "gemma3.log", *flags)
    memory = {"host_memory": "2GiB", "device_memory": "1500MB"}
    with start(config=memory | {"budget": 8448, "device_buffer_size": 8448}) as server:
        assert "15 of 18 layers attend windows of 512 tokens" in server.log()
        assert [x.ids for x in server.generate_many(prompts, count)] == dense
        again = server.generate(prompts[1], count)
        assert (again.ids, again.cached) == (dense[1], LENGTHS[1] - 16)
    with start(config=memory | {"budget": 512}) as server:
        answers = server.generate_many(prompts, count, top_logprobs=1)
        assert all(len(answer.ids) == count for answer in answers)
        assert all(math.isfinite(x) for answer in answers for x in answer.logprobs)
        assert server.metrics()["hisparse:selections"] > 0
