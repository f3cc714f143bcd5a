"""K and V, or latents, in eight bits: bytes of the format, and the tokens of what is kept.

fp8 by SGLang's flag; int8, which that flag does not have, by the key. Eight bits magnify float32
noise, which depends on the batch and on the machine. So a token counts if it leads the second best
by more than a case's ``lead``, up to the first that does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import certain
from harness import Server
from hugging_face import greedy, load
from parts import MORE
from planned_bytes import assert_planned
from settings import latents
from tiny_models import LAYERS, tiny_model
from torch import Tensor
from transformers import AutoTokenizer
from transformers.cache_utils import DynamicLayer
from workload import tokens

from hisparse.cache.formats import format_of
from hisparse.eval.models import fetch
from hisparse.eval.texts import read_text
from hisparse.types import KVSpec

pytestmark = pytest.mark.slow

NEW_TOKENS = 24
#: Of SmolLM2.
SHAPE = {"num_layers": 30, "num_q_heads": 9, "num_kv_heads": 3, "head_dim": 64, "v_head_dim": 64}
CONFIG = {"budget": 512, "device_buffer_size": 512, "host_memory": "1GiB", "device_memory": "1GiB"}


@dataclass(frozen=True)
class Case:
    """A model, and how it keeps what in eight bits.

    Attributes:
        dtype: of K and V.
        token_bytes: of one token in all layers.
        lead: of a token that counts, in logprob.
        config: of the server, without the dtype.
        kind: of a tiny model; None: SmolLM2.
        chunk: tokens of a chunk. Prompts are whole chunks, the same whoever comes before.
    """

    dtype: str
    token_bytes: int
    lead: float
    config: dict[str, Any]
    kind: str | None = None
    chunk: int = 256

    @property
    def model(self) -> Path:
        return fetch("smollm2-135m") if self.kind is None else tiny_model(self.kind)

    def start(self, log: Path, *, exact: bool = False) -> Server:
        flags = ["--max-total-tokens", "8192", "--chunked-prefill-size", str(self.chunk)]
        flags += ["--max-running-requests", "4"]
        config = self.config | ({"kv_cache_dtype": "int8"} if self.dtype == "int8" else {})
        if self.dtype != "int8" and not exact:
            flags += ["--kv-cache-dtype", self.dtype]
        env = {"TORCHDYNAMO_DISABLE": "1"}
        return Server(self.model, log, *flags, config=config, env=env)


#: A byte a number, and one for the scale of each vector.
_HEADS = 30 * 3 * 2 * (64 + 1)
#: 64 codes, a scale, 16 rotary channels of two bytes, padding.
_LATENTS = LAYERS * 112
CASES = {
    "fp8": Case("fp8_e4m3", _HEADS, 0.2, CONFIG, chunk=128),
    "int8": Case("int8", _HEADS, 0.2, CONFIG, chunk=128),
    **{
        kind: Case("fp8_e4m3", _LATENTS, 0.05, config, kind)
        for kind, config in latents(512, 512).items()
    },
}


@pytest.fixture(
    scope="module",
    params=[
        "fp8",
        pytest.param("int8", marks=MORE),
        pytest.param("deepseek_v2", marks=MORE),
        pytest.param("deepseek_v32", marks=[*MORE, pytest.mark.modes]),
    ],
)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def server(case: Case, log_dir: Path) -> Iterator[Server]:
    with case.start(log_dir / f"eight-bits-{case.dtype}-{case.kind}.log") as running:
        yield running


@pytest.fixture(scope="module")
def prompts(case: Case) -> list[list[int]]:
    """Within the budget and beyond it."""
    if case.kind is not None:
        return [tokens(n, seed=n) for n in (50, 256, 333, 768)]
    ids = AutoTokenizer.from_pretrained(case.model)(read_text("moby_dick")[:8000]).input_ids
    return [ids[:400], ids[240:1136], ids[360:1256]]


def test_heads_within_the_budget_are_dense(
    case: Case, server: Server, prompts: list[list[int]]
) -> None:
    """Greedy tokens of transformers, its K and V rounded as eight bits round them."""
    if case.kind is not None:
        pytest.skip("transformers keeps no latents")
    spec = KVSpec(**SHAPE, dtype=torch.float32, page_size=16, kv_cache_dtype=case.dtype)
    update = DynamicLayer.update

    def rounded(self: Any, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
        return update(self, *format_of(spec).as_read(k, v), *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DynamicLayer, "update", rounded)
        dense = greedy(load(case.model), prompts[0], NEW_TOKENS)
    first, again = (server.generate(prompts[0], NEW_TOKENS, top_logprobs=2) for _ in range(2))
    same = certain(first, case.lead)
    assert len(same) >= 5
    assert again.ids[: len(same)] == dense[: len(same)] == same
    assert (first.cached, again.cached) == (0, 384)


def test_latents_are_near_exact_ones(
    case: Case, server: Server, prompts: list[list[int]], log_dir: Path
) -> None:
    if case.kind is None:
        pytest.skip("compared with transformers")
    with case.start(log_dir / f"exact-{case.kind}.log", exact=True) as reference:
        right = [reference.generate(prompt, 1, top_logprobs=5) for prompt in prompts]
    server.flush_cache()
    off = []
    for prompt, exact in zip(prompts, right, strict=True):
        (got,), (expected,) = (
            answer.top_logprobs for answer in (server.generate(prompt, 1, top_logprobs=5), exact)
        )
        off += [abs(got[token] - expected[token]) for token in got.keys() & expected.keys()]
    assert len(off) >= 2 * len(prompts), "other tokens lead"
    assert 0 < max(off) < 1.5
    assert sum(off) / len(off) < 0.4


def test_tokens_are_the_same_together_and_from_the_radix_cache(
    case: Case, server: Server, prompts: list[list[int]]
) -> None:
    # A real model takes its time, and has been asked for the first one.
    prompts, alone = prompts if case.kind else prompts[1:], []
    for prompt in prompts:
        server.flush_cache()
        answer = server.generate(prompt, NEW_TOKENS, top_logprobs=2)
        assert torch.tensor(answer.logprobs).isfinite().all()
        alone.append(certain(answer, case.lead))
    assert sum(map(len, alone)) >= 10
    server.flush_cache()
    together = server.generate_many(prompts, NEW_TOKENS)
    cached = [server.generate(prompt, NEW_TOKENS) for prompt in prompts]
    assert cached[-1].cached >= len(prompts[-1]) - case.chunk
    for answers in (together, cached):
        pairs = zip(answers, alone, strict=True)
        assert [answer.ids[: len(same)] for answer, same in pairs] == alone


def test_bytes_are_those_of_the_format(case: Case, server: Server) -> None:
    total, held, written = server.counted("host_tokens_total", "host_kv_bytes", "written_bytes")
    # SGLang keeps a page for padding, and has whole pages: of 16 tokens, and of 64.
    assert total < held // case.token_bytes <= total + 64
    assert held % case.token_bytes == 0
    assert written % case.token_bytes == 0 < written
    if case.kind is None:
        assert "kv_tokens 8,192" in server.log()


def test_bytes_are_those_of_the_plan(case: Case, server: Server) -> None:
    if case.kind is not None:
        pytest.skip("float32 latents are compared in test_deepseek.py")
    config = case.config | {"kv_cache_dtype": case.dtype}
    assert_planned(server, case.model, config, context=8192, max_requests=4)
