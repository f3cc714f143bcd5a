"""The package of docs/write-an-algorithm.md, installed outside the tree and served."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Server
from tiny_models import KV_HEADS, LAYERS, tiny_model
from workload import tokens

EXAMPLE = Path(__file__).parents[2] / "examples" / "hisparse-knorm"
PAGE, BUDGET = 16, 128
CONFIG = {
    "algorithm": "knorm",
    "budget": BUDGET,
    "selection_scope": "kv_head",
    "host_memory": "1GiB",
    "device_memory": "32MB",
    "checked": True,
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip has put the package into."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    copy = shutil.copytree(EXAMPLE, source / "package")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--target", str(target), str(copy)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target


def test_the_installed_algorithm_is_listed(installed: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hisparse", "algorithms", "--json"],
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = {entry["name"]: entry for entry in json.loads(done.stdout)["algorithms"]}
    assert found["knorm"]["module"] == "hisparse_knorm"
    assert found["knorm"]["summary"].startswith("Keeps the pages that hold the smallest keys")


def test_it_serves(installed: Path, log_dir: Path) -> None:
    """Every step of a long request selects as many pages as the budget holds."""
    prompt, count = tokens(700, seed=1), 24
    flags = ("--max-total-tokens", "4000", "--max-running-requests", "2")
    log = log_dir / "example.log"
    options = {"config": CONFIG, "python_path": [installed], "forked": False}
    with Server(tiny_model("llama"), log, *flags, **options) as server:
        answer = server.generate(prompt, count)
        selected = sum(server.counted("hit_pages", "miss_pages"))
        server.flush_cache()
        again = server.generate(prompt, count)
    assert len(answer.ids) == count
    assert again.ids == answer.ids
    # Prefill gives the first token.
    assert selected == (count - 1) * (BUDGET // PAGE - 1) * LAYERS * KV_HEADS
