"""SGLang's own client for measurements, ``python -m sglang.benchmark.serving``, as docs show it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import Server
from parts import MORE
from tiny_models import with_tokenizer

# SGLang requires `datasets` and the CPU set-up leaves it out: `make lm-eval` installs it apart.
DATASETS = Path(sys.prefix) / "lm-eval"
pytestmark = [
    *MORE,
    pytest.mark.skipif(
        not (DATASETS / "datasets").exists(),
        reason="not installed: make lm-eval, which make test does",
    ),
]

REQUESTS, INPUT, OUTPUT = 6, 400, 12
CONFIG = {"budget": 128, "host_memory": "1GiB", "device_memory": "64MB"}


def test_it_measures_this_server(log_dir: Path, tmp_path: Path) -> None:
    model = with_tokenizer(tmp_path / "model")
    flags = ("--max-total-tokens", "8000", "--max-running-requests", "4")
    result = tmp_path / "result.jsonl"
    log = log_dir / "bench-client.log"
    with Server(model, log, *flags, config=CONFIG, tokenizer=True) as server:
        client = [sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang"]
        client += ["--base-url", server.url, "--tokenizer", str(model)]
        client += ["--dataset-name", "random-ids", "--tokenize-prompt"]
        client += ["--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT)]
        client += ["--random-range-ratio", "0.5", "--num-prompts", str(REQUESTS)]
        client += ["--max-concurrency", "3", "--disable-tqdm", "--output-file", str(result)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(DATASETS), *sys.path])}
        done = subprocess.run(
            client, env=env, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]
        selected = sum(server.counted("hit_pages", "miss_pages"))
    (line,) = result.read_text().splitlines()
    measured = json.loads(line)
    assert measured["completed"] == REQUESTS
    assert REQUESTS * INPUT // 2 <= measured["total_input_tokens"] <= REQUESTS * INPUT
    assert measured["total_output_tokens"] >= REQUESTS * OUTPUT // 2
    assert selected > 0, "the requests were longer than the budget"
