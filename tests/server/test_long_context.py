"""A real model: two contexts of 7k tokens at the same time, from host memory, through device
buffers of 1,024 tokens each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import Answer, Server
from parts import MORE

from hisparse.demo.document import Fact, make_prompt
from hisparse.eval.models import fetch

pytestmark = [pytest.mark.slow, *MORE]

PAGE, BUDGET, BUFFER = 16, 512, 1024
STAGING = 1 << 23
LAYERS, KV_HEADS, HEAD_DIM, FLOAT = 30, 3, 64, 4

_HARBOUR, _CASTLE = (
    Fact(
        sentence=f"The password of the {gate} gate is {word}.",
        question=f"What is the password of the {gate} gate?",
        answer=word,
    )
    for gate, word in (
        ("harbour", "BLUE HERRING"),
        ("castle", "GREEN LANTERN"),
    )
)

#: Two documents that differ from the depth of the fact on.
FACTS = [(_HARBOUR, 0.8), (_CASTLE, 0.95)]
CONTEXTS = len(FACTS)
POOL = 10 * CONTEXTS * BUFFER


@dataclass(frozen=True)
class Seen:
    """What the server said and showed while it answered."""

    prompts: list[list[int]]
    answers: list[Answer]
    texts: list[str]
    host_tokens_used: float
    device_tokens_used: float
    metrics: Any


@pytest.fixture(scope="module")
def seen(log_dir: Path) -> Iterator[Seen]:
    """All contexts served together."""
    from transformers import AutoTokenizer

    model = fetch("smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": make_prompt(fact, depth)}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for fact, depth in FACTS
    ]
    config = {
        "budget": BUDGET,
        "device_buffer_size": BUFFER,
        "max_row_capacity": BUFFER,
        "host_memory": "2GiB",
        "device_memory": "1GiB",
        "staging_bytes": STAGING,
        "selection_scope": "kv_head",
    }
    flags = ("--max-total-tokens", str(POOL), "--max-running-requests", str(CONTEXTS))
    log = log_dir / "long-context.log"
    with (
        Server(model, log, *flags, config=config) as server,
        ThreadPoolExecutor(1) as thread,
    ):
        waiting = thread.submit(server.generate_many, prompts, 24)
        host = device = 0.0
        while not waiting.done():
            used = server.counted("host_tokens_used", "device_tokens_used")
            host, device = max(host, used[0]), max(device, used[1])
            time.sleep(0.2)
        answers = waiting.result()
        texts = [tokenizer.decode(answer.ids) for answer in answers]
        yield Seen(prompts, answers, texts, host, device, server.metrics())


def test_the_contexts_are_long_and_lie_in_host_memory_together(seen: Seen) -> None:
    lengths = [len(prompt) for prompt in seen.prompts]
    assert min(lengths) >= 6900
    # A page that several documents share lies there once.
    pages = {
        tuple(prompt[:end]) for prompt in seen.prompts for end in range(PAGE, len(prompt) + 1, PAGE)
    }
    assert seen.host_tokens_used >= len(pages) * PAGE
    assert seen.host_tokens_used > 2 * CONTEXTS * BUFFER
    assert [answer.retractions for answer in seen.answers] == [0] * CONTEXTS
    assert seen.metrics["hisparse:host_tokens_total"] == POOL


@pytest.mark.parametrize("which", range(CONTEXTS))
def test_the_fact_is_found(seen: Seen, which: int) -> None:
    fact, _ = FACTS[which]
    assert fact.is_found_in(seen.texts[which]), seen.texts[which]


def test_the_device_holds_no_more_than_the_buffers(seen: Seen) -> None:
    buffers = CONTEXTS * KV_HEADS * BUFFER
    assert seen.metrics["hisparse:device_tokens_total"] == buffers
    assert seen.device_tokens_used == buffers
    assert seen.metrics["hisparse:host_tokens_total"] >= 10 * CONTEXTS * BUFFER


def test_bytes_reported_are_bytes_allocated(seen: Seen) -> None:
    """By hand: buffers and tail pages of both requests, the tail pages of padding, staging."""
    page = PAGE * 2 * HEAD_DIM * FLOAT
    pages = CONTEXTS * KV_HEADS * (BUFFER // PAGE + 1) + KV_HEADS
    staging_page = KV_HEADS * page
    staging = STAGING // staging_page * staging_page
    host = (POOL + PAGE) * LAYERS * KV_HEADS * 2 * HEAD_DIM * FLOAT
    metrics = seen.metrics
    assert metrics["hisparse:device_kv_bytes"] == LAYERS * pages * page + staging
    assert metrics["hisparse:host_kv_bytes"] == host
    # Sketch: a byte a channel; for 8 channels a scale and a byte of the mask; for each of the 20
    # detailed channels two bits a token and a scale.
    sketch = HEAD_DIM + 2 * HEAD_DIM // 8 + 20 * (PAGE // 4 + 1)
    summaries = (POOL // PAGE + 1) * LAYERS * KV_HEADS * sketch
    assert metrics["hisparse:device_representation_bytes"] == summaries


def test_pages_came_from_host_memory_and_most_were_there_already(seen: Seen) -> None:
    page = PAGE * 2 * HEAD_DIM * FLOAT
    metrics = seen.metrics
    assert metrics["hisparse:miss_pages"] > 0
    assert metrics["hisparse:decode_read_bytes"] == metrics["hisparse:miss_pages"] * page
    assert metrics["hisparse:hit_pages"] > metrics["hisparse:miss_pages"]
    selected = metrics["hisparse:hit_pages"] + metrics["hisparse:miss_pages"]
    assert metrics["hisparse:hit_ratio"] == pytest.approx(metrics["hisparse:hit_pages"] / selected)
