"""KV in eight bits on a real model: tokens of dense attention over what the server keeps.

fp8 by SGLang's own flag; int8, which that flag does not have, by the key.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import certain
from harness import Server
from hugging_face import greedy, load
from parts import MORE
from planned_bytes import assert_planned
from torch import Tensor
from transformers import AutoTokenizer
from transformers.cache_utils import DynamicLayer

from hisparse.cache.formats import format_of
from hisparse.eval.models import fetch
from hisparse.eval.texts import read_text
from hisparse.types import KVSpec

pytestmark = pytest.mark.slow

LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64
#: A byte a number, and one for the scale of each vector.
TOKEN_BYTES = LAYERS * KV_HEADS * 2 * (HEAD_DIM + 1)
NEW_TOKENS = 24
#: Eight bits magnify float32 noise, which depends on the batch and on the machine, to about 0.1 in
#: a logprob. So a token counts if it leads the second best by more than this, up to the first that
#: does not.
LEAD = 0.2
CONFIG = {"budget": 512, "device_buffer_size": 512, "host_memory": "1GiB", "device_memory": "1GiB"}


@pytest.fixture(scope="module")
def model() -> Path:
    return fetch("smollm2-135m")


@pytest.fixture(scope="module")
def text(model: Path) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return tokenizer(read_text("moby_dick")[:8000]).input_ids


@pytest.fixture(scope="module", params=["fp8_e4m3", pytest.param("int8", marks=MORE)])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(model: Path, dtype: str, log_dir: Path) -> Iterator[Server]:
    flags = ["--max-total-tokens", "8192", "--chunked-prefill-size", "128"]
    flags += ["--max-running-requests", "4"]
    config = CONFIG | {"kv_cache_dtype": dtype}
    if dtype == "fp8_e4m3":
        config, flags = CONFIG, [*flags, "--kv-cache-dtype", dtype]
    with Server(model, log_dir / f"{dtype}.log", *flags, config=config) as running:
        yield running


@pytest.fixture(scope="module")
def dense(model: Path, dtype: str, text: list[int]) -> list[int]:
    """Greedy tokens of transformers after 400, its K and V rounded as eight bits round them."""
    spec = KVSpec(
        num_layers=LAYERS,
        num_q_heads=9,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        dtype=torch.float32,
        page_size=16,
        kv_cache_dtype=dtype,
    )
    update = DynamicLayer.update

    def rounded(self: Any, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
        return update(self, *format_of(spec).as_read(k, v), *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DynamicLayer, "update", rounded)
        return greedy(load(model), text[:400], NEW_TOKENS)


def test_tokens_within_the_budget_are_dense(
    server: Server, text: list[int], dense: list[int]
) -> None:
    """From chunks of 128 tokens, and again from the radix cache."""
    first, again = (server.generate(text[:400], NEW_TOKENS, top_logprobs=2) for _ in range(2))
    same = certain(first, LEAD)
    assert len(same) >= 5
    assert again.ids[: len(same)] == dense[: len(same)] == same
    assert (first.cached, again.cached) == (0, 384)


def test_beyond_the_budget_nothing_else_changes_the_tokens(server: Server, text: list[int]) -> None:
    # Prompts are whole chunks, the same whoever comes before.
    prompts = [text[start : start + 896] for start in (240, 360)]
    alone = []
    for prompt in prompts:
        server.flush_cache()
        alone.append(certain(server.generate(prompt, NEW_TOKENS, top_logprobs=2), LEAD))
    assert min(map(len, alone)) >= 5
    server.flush_cache()
    together = server.generate_many(prompts, NEW_TOKENS)
    cached = [server.generate(prompt, NEW_TOKENS) for prompt in prompts]
    for answers in (together, cached):
        pairs = zip(answers, alone, strict=True)
        assert [answer.ids[: len(same)] for answer, same in pairs] == alone


def test_bytes_reported_are_those_of_eight_bits(server: Server) -> None:
    metrics = server.metrics()
    tokens = metrics["hisparse:host_tokens_total"]
    # SGLang keeps a page for padding.
    assert metrics["hisparse:host_kv_bytes"] == (tokens + 16) * TOKEN_BYTES
    written = metrics["hisparse:written_bytes"]
    assert written % TOKEN_BYTES == 0 < written
    assert "kv_tokens 8,192" in server.log()


def test_bytes_are_those_of_the_plan(server: Server, model: Path, dtype: str) -> None:
    config = CONFIG | {"kv_cache_dtype": dtype}
    assert_planned(server, model, config, context=8192, max_requests=4)
