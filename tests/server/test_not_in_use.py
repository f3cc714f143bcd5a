"""A server beside which hisparse is installed, but that does not use it, is as SGLang made it."""

from __future__ import annotations

import time
from pathlib import Path

from harness import Server
from tiny_models import tiny_model
from workload import tokens

PROMPTS = [tokens(300, seed=1), tokens(40, seed=2), tokens(300, seed=1)]
FLAGS = ("--max-total-tokens", "4000", "--max-running-requests", "2")
#: A plug-in of this name does not exist, so SGLang loads none.
WITHOUT = {"SGLANG_PLUGINS": "none", "HISPARSE_IN_USE": ""}
WITH = {"HISPARSE_IN_USE": ""}


def _serve(log: Path, env: dict[str, str], *, forked: bool) -> tuple[list[list[int]], set[str]]:
    """Tokens of all prompts, and the names of the metrics after them."""
    options = {"backend": "torch_native", "env": env, "forked": forked}
    with Server(tiny_model("llama"), log, *FLAGS, **options) as server:
        ids = [server.generate(prompt, 24).ids for prompt in PROMPTS]
        names = set(server.metrics())
        # SGLang shows some metrics only after a while, by its own clock.
        for _ in range(10):
            time.sleep(0.5)
            server.generate(PROMPTS[1], 4)
            names |= set(server.metrics())
        return ids, names


def test_tokens_and_metrics_are_those_without_it(log_dir: Path) -> None:
    with_it = _serve(log_dir / "with.log", WITH, forked=False)
    without = _serve(log_dir / "without.log", WITHOUT, forked=True)
    assert with_it == without
    assert not [name for name in with_it[1] if name.startswith("hisparse")]
