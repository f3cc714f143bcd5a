"""What the other server tests rest on: SGLang's dense answers are the model's own."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from conftest import DenseTokens
from harness import Metrics, Server
from tiny_models import tiny_model
from workload import NEW_TOKENS, PROMPTS, Case


def _hugging_face(kind: str, case: Case) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype=torch.float32).eval()
    return [_greedy(model, prompt, case.new_tokens) for prompt in case.prompts]


@torch.no_grad()
def _greedy(model: torch.nn.Module, prompt: Sequence[int], new_tokens: int) -> list[int]:
    ids, cache, found = torch.tensor([list(prompt)]), None, []
    for _ in range(new_tokens):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
        found.append(int(ids))
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_torch_native_gives_the_tokens_of_hugging_face(
    kind: str, dense_tokens: DenseTokens
) -> None:
    assert dense_tokens(kind, PROMPTS) == _hugging_face(kind, PROMPTS)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_answers_wander(kind: str, dense_tokens: DenseTokens) -> None:
    """A model that repeats itself, or says the same to every prompt, would hide errors."""
    answers = dense_tokens(kind, PROMPTS)
    assert len({tuple(answer) for answer in answers}) == len(answers)
    assert min(len(set(answer)) for answer in answers) > NEW_TOKENS // 4


class _Listener(Server):
    """A child that opens the port and never gets healthy; its own child ignores SIGTERM."""

    CODE = (
        "import os, signal, socket, sys, time\n"
        "held = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
        "print('listening', flush=True)\n"
        "if os.fork() == 0: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "time.sleep(600)"
    )

    def __init__(self, log: Path) -> None:
        super().__init__(Path("no-model"), log, forked=False)
        self._line = [sys.executable, "-c", self.CODE, str(self._port)]


def test_a_server_that_ends_at_once_shows_the_end_of_its_log(tmp_path: Path) -> None:
    server = Server(tmp_path, tmp_path / "log", forked=False)
    server._line = [sys.executable, "-c", "import sys; sys.exit('no weights here')"]
    with pytest.raises(RuntimeError, match=r"ended with 1; its log ends:\nno weights here"):
        server.__enter__()


def test_stop_leaves_no_process_of_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness._START_TIMEOUT_S", 10)
    server = _Listener(tmp_path / "log")
    with pytest.raises(RuntimeError, match=r"did not come up in 10 s; its log ends:\nlistening"):
        server.__enter__()
    time.sleep(0.2)
    with socket.socket() as probe:
        probe.settimeout(1)
        with pytest.raises(ConnectionRefusedError):
            probe.connect(("127.0.0.1", server._port))


def test_metrics_are_summed_over_labels() -> None:
    page = '# HELP x y\nhisparse:hits_total{rank="0"} 2.0\nhisparse:hits_total{rank="1"} 3.5\n'
    metrics = Metrics(page)
    assert metrics["hisparse:hits"] == metrics["hisparse:hits_total"] == 5.5
    with pytest.raises(KeyError, match="hisparse:misses is not among the metrics"):
        metrics["hisparse:misses"]
