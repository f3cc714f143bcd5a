"""``--kv-cache-dtype fp8_e4m3`` on models with latents: DeepSeek's bytes, and near answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checks import certain
from harness import Answer, Server
from parts import MORE, few
from settings import latents
from tiny_models import LAYERS, tiny_model
from workload import tokens

pytestmark = MORE

NEW_TOKENS = 16
POOL = 20000
#: 64 codes, a scale, 16 rotary channels of two bytes, padding.
TOKEN_BYTES = LAYERS * 112
#: Eight bits magnify float32 noise: a token counts if it leads the second best by more than this.
LEAD = 0.05
FLAGS = ("--max-total-tokens", str(POOL), "--chunked-prefill-size", "256")
CONFIGS = latents(512, 512)
#: Whole chunks, so that chunks are the same whoever comes before.
PROMPTS = [tokens(n, seed=n) for n in (50, 256, 333, 768)]


@dataclass(frozen=True)
class Served:
    """A server, and what one with latents in the model's dtype answers."""

    server: Server
    exact: list[Answer]


@pytest.fixture(scope="module", params=few(CONFIGS, "deepseek_v2"))
def served(request: pytest.FixtureRequest, log_dir: Path) -> Iterator[Served]:
    kind = request.param
    options = {"config": CONFIGS[kind], "env": {"TORCHDYNAMO_DISABLE": "1"}}
    with Server(tiny_model(kind), log_dir / f"{kind}-exact.log", *FLAGS, **options) as server:
        exact = [server.generate(prompt, 1, top_logprobs=5) for prompt in PROMPTS]
    flags = (*FLAGS, "--kv-cache-dtype", "fp8_e4m3")
    with Server(tiny_model(kind), log_dir / f"{kind}-fp8.log", *flags, **options) as server:
        yield Served(server, exact)


def test_logprobs_are_near_those_of_exact_latents(served: Served) -> None:
    served.server.flush_cache()
    off = []
    for prompt, exact in zip(PROMPTS, served.exact, strict=True):
        answer = served.server.generate(prompt, 1, top_logprobs=5)
        assert torch.tensor(answer.logprobs).isfinite().all()
        got, expected = answer.top_logprobs[0], exact.top_logprobs[0]
        off += [abs(got[token] - expected[token]) for token in got.keys() & expected.keys()]
    assert len(off) >= 2 * len(PROMPTS), "other tokens lead"
    assert 0 < max(off) < 1.5
    assert sum(off) / len(off) < 0.4


def test_tokens_are_the_same_together_and_from_the_radix_cache(served: Served) -> None:
    server, alone = served.server, []
    for prompt in PROMPTS:
        server.flush_cache()
        answer = server.generate(prompt, NEW_TOKENS, top_logprobs=2)
        assert torch.tensor(answer.logprobs).isfinite().all()
        alone.append(certain(answer, LEAD))
    assert sum(map(len, alone)) >= 12
    server.flush_cache()
    together = server.generate_many(PROMPTS, NEW_TOKENS)
    cached = [server.generate(prompt, NEW_TOKENS) for prompt in PROMPTS]
    assert cached[3].cached >= 512
    for answers in (together, cached):
        pairs = zip(answers, alone, strict=True)
        assert [answer.ids[: len(same)] for answer, same in pairs] == alone


def test_bytes_are_those_of_the_format(served: Served) -> None:
    held, written = served.server.counted("host_kv_bytes", "written_bytes")
    # SGLang keeps a page for padding, and has whole pages: of 16 tokens, and of 64.
    assert POOL < held // TOKEN_BYTES <= POOL + 64
    assert held % TOKEN_BYTES == 0
    assert written % TOKEN_BYTES == 0 < written
