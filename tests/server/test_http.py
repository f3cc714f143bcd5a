"""Odd and broken requests are answered as with SGLang's own backend, and nothing stays behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import requests
from checks import assert_nothing_held
from harness import Server
from hostile_requests import CONTEXT, ENDS_SGLANG, REQUESTS
from settings import SPARSE
from tiny_models import with_tokenizer
from workload import tokens

FLAGS = ("--max-total-tokens", "40000", "--max-running-requests", "8")
PROMPT = tokens(400, seed=8)


def statuses(server: Server) -> dict[str, int]:
    """The HTTP status of each request; the server answers a good one after each."""
    found = {}
    for name, (path, body) in REQUESTS.items():
        data = body if isinstance(body, (str, bytes)) else json.dumps(body)
        headers = {"Content-Type": "application/json"}
        reply = requests.post(f"{server.url}{path}", data=data, headers=headers, timeout=120)
        found[name] = reply.status_code
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_tokenizer(tmp_path_factory.mktemp("model") / "words")


@pytest.fixture(scope="module")
def expected(model: Path, log_dir: Path) -> dict[str, int]:
    log = log_dir / "http-native.log"
    with Server(model, log, *FLAGS, backend="torch_native", tokenizer=True) as server:
        return statuses(server)


def test_requests_are_answered_as_with_torch_native(
    model: Path, log_dir: Path, expected: dict[str, int]
) -> None:
    assert not ENDS_SGLANG.keys() & REQUESTS.keys()
    assert {200, 400, 404, 500} == set(expected.values())
    log = log_dir / "http.log"
    with Server(model, log, *FLAGS, config=SPARSE, tokenizer=True) as server:
        right = server.generate(PROMPT, 20).ids
        assert statuses(server) == expected
        server.flush_cache()
        assert server.generate(PROMPT, 20).ids == right
        assert_nothing_held(server)


def test_a_flush_under_load_is_refused_and_changes_nothing(model: Path, log_dir: Path) -> None:
    log = log_dir / "http-flush.log"
    with Server(model, log, *FLAGS, config=SPARSE, tokenizer=True) as server:
        right = server.generate(PROMPT, 60).ids
        server.flush_cache()
        # This one runs until it is aborted, so the server is busy however slow this process is.
        with server.stream(tokens(100, seed=9), CONTEXT - 200) as events:
            next(events)
            with server.stream(PROMPT, 60) as answer:
                for event in answer:
                    ids = event["output_ids"]
                    assert requests.post(f"{server.url}/flush_cache", timeout=60).status_code == 400
        assert ids == right
