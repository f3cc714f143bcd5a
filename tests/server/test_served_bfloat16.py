"""Fresh and cached runs of a prompt in bfloat16, through the real server."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Server
from parts import MORE
from tiny_models import tiny_model
from workload import tokens

from hisparse.kernels.build.cpu import cpu_library

pytestmark = [
    *MORE,
    pytest.mark.skipif(cpu_library() is None, reason="the order of PyTorch's sums differs"),
]

_FLAGS = ("--dtype", "bfloat16", "--max-total-tokens", "20000", "--chunked-prefill-size", "4096")
_CONFIG = {"budget": 2048, "host_memory": "1GiB", "device_memory": "300MB"}
#: What is left of them behind the cached pages is 10, 16 and 13 tokens.
PROMPTS = [tokens(n, seed=n) for n in (330, 512, 1501)]


def test_a_cached_prefix_changes_neither_tokens_nor_log_probabilities(log_dir: Path) -> None:
    log = log_dir / "bfloat16.log"
    with Server(tiny_model("llama"), log, *_FLAGS, config=_CONFIG) as server:
        for prompt in PROMPTS:
            fresh, cached = (server.generate(prompt, 24, top_logprobs=1) for _ in range(2))
            assert cached.cached >= len(prompt) - 16 and fresh.cached == 0
            assert cached.ids == fresh.ids
            assert cached.logprobs == fresh.logprobs
