"""A server beside which hisparse is installed, but that does not use it, is as SGLang made it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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

LOAD_PLUGINS = """
import json, sys
import sglang.launch_server
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry

before = set(sys.modules)
load_plugins()
print(json.dumps([sorted(HookRegistry._hooks), sorted(set(sys.modules) - before)]))
"""


def test_it_hooks_and_imports_no_more_than_needed_to_see_the_arguments() -> None:
    """Each process of each server of the machine pays for what this loads."""
    env = os.environ | WITH | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD_PLUGINS], env=env, capture_output=True, text=True, check=True
    )
    hooks, modules = json.loads(done.stdout.splitlines()[-1])
    assert hooks == [
        "sglang.srt.server_args.ServerArgs.resolve_once",
        "sglang.srt.server_args.prepare_server_args",
    ]
    ours = {name for name in modules if name.startswith("hisparse.")}
    assert "hisparse.sglang.plugin" in ours
    rooms = {name.split(".")[1] for name in ours}
    assert not rooms & {"adapters", "algorithms", "cache", "engine", "kernels", "memory"}
    # Those that need no plug-in either come with SGLang's registry of attention backends.
    others = {name.split(".")[0] for name in modules} - {"hisparse", "sglang"}
    assert not others & {"numpy", "torch", "psutil", "rich"}


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
