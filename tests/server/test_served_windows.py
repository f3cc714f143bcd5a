"""Models with sliding windows, capped logits or sinks through the real server.

Greedy tokens are those of SGLang's ``torch_native``, which knows windows. It knows neither caps nor
sinks: Gemma 2 and gpt-oss are compared with transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import Server
from parts import MORE, few
from planned_bytes import assert_planned
from tiny_models import WINDOW, tiny_model
from workload import tokens

pytestmark = MORE

_NEW_TOKENS = 24
_PREFIX = tokens(700, seed=31)
#: The last two share whole pages, and end at other places of a page.
PROMPTS = [tokens(90, seed=30), _PREFIX + tokens(333, seed=32), _PREFIX + tokens(20, seed=33)]
#: Layers that attend the whole context in SGLang.
FULL = {"mistral": 3, "phi3": 3, "gemma2": 1, "gemma3": 1, "cohere2": 1, "gpt_oss": 1}
_FLAGS = (
    *("--max-total-tokens", "20000", "--max-running-requests", "4"),
    *("--chunked-prefill-size", "256"),
)
_MEMORY = {"host_memory": "1GiB", "device_memory": "300MB"}
_ROOMY = _MEMORY | {"budget": 8192}
#: A device buffer below the window, which is raised.
_SMALL = _MEMORY | {"budget": 80, "device_buffer_size": 80, "checked": True}


def _of_torch_native(kind: str, log_dir: Path) -> list[list[int]]:
    flags = (*_FLAGS, "--disable-radix-cache")
    log = log_dir / f"windows-dense-{kind}.log"
    with Server(tiny_model(kind), log, *flags, backend="torch_native") as server:
        return [server.generate(prompt, _NEW_TOKENS).ids for prompt in PROMPTS]


def _of_transformers(kind: str, log_dir: Path) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    # PyTorch's own attention, which transformers takes by default, ignores caps.
    net = AutoModelForCausalLM.from_pretrained(tiny_model(kind), attn_implementation="eager").eval()
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = net.generate(ids, max_new_tokens=_NEW_TOKENS, do_sample=False, pad_token_id=0)
        found.append(out[0, len(prompt) :].tolist())
    return found


DENSE: dict[str, Callable[[str, Path], list[list[int]]]] = {
    kind: _of_transformers if kind in ("gemma2", "gpt_oss") else _of_torch_native for kind in FULL
}


@pytest.mark.parametrize("kind", few(FULL, "gemma3", "gpt_oss"))
def test_a_roomy_budget_gives_the_dense_tokens(kind: str, log_dir: Path) -> None:
    dense = DENSE[kind](kind, log_dir)
    assert all(len(set(ids)) > 5 for ids in dense), "continuations that repeat show little"
    log = log_dir / f"windows-{kind}.log"
    with Server(tiny_model(kind), log, *_FLAGS, config=_ROOMY) as server:
        together = server.generate_many(PROMPTS, _NEW_TOKENS)
        assert [answer.ids for answer in together] == dense
        again = server.generate_many(PROMPTS, _NEW_TOKENS)
        assert [answer.ids for answer in again] == dense
        assert min(answer.cached for answer in again[1:]) >= 640
        aborted = server.abort_after(PROMPTS[1], num_tokens=5, max_new_tokens=1000)
        assert aborted[:_NEW_TOKENS] == dense[1][: len(aborted)]
        assert server.generate(PROMPTS[2], _NEW_TOKENS).ids == dense[2]
        windows = 3 - FULL[kind]
        line = f"{windows} of 3 layers attend windows of {WINDOW + (kind == 'cohere2')} tokens"
        assert (line in server.log()) == bool(windows)
        if kind == "gemma3":
            assert_planned(server, tiny_model(kind), _ROOMY, context=8192, max_requests=4)


@pytest.mark.parametrize("kind", few(FULL, "gemma2"))
def test_a_small_budget_keeps_requests_apart(kind: str, log_dir: Path) -> None:
    log = log_dir / f"windows-small-{kind}.log"
    with Server(tiny_model(kind), log, *_FLAGS, config=_SMALL) as server:
        together = server.generate_many(PROMPTS, _NEW_TOKENS, top_logprobs=1)
        server.flush_cache()
        alone = [server.generate(prompt, _NEW_TOKENS, top_logprobs=1) for prompt in PROMPTS]
        assert [x.ids for x in together] == [x.ids for x in alone]
        assert all(math.isfinite(value) for x in alone for value in x.logprobs)
        assert ("is raised to" in server.log()) == (FULL[kind] < 3)
