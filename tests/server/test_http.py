"""A dense and a sparse server with a tokenizer: odd requests are answered alike and leave nothing
behind, and clients for measurements measure both.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from checks import assert_nothing_held
from harness import Server
from parts import more
from settings import SPARSE
from tiny_models import CONTEXT, VOCAB, with_tokenizer
from workload import tokens

from tests.command import Command

#: A pool that is smaller than the model's context.
POOL = CONTEXT - 96
FLAGS = ("--max-total-tokens", str(POOL), "--max-running-requests", "8")
# SGLang requires `datasets` and the CPU set-up leaves it out: `make datasets` installs it apart.
DATASETS = Path(sys.prefix) / "datasets"
PROMPT = tokens(400, seed=8)

#: Path, and the body: an object, or text that is sent as it is.
Request = tuple[str, Any]

_SHORT = tokens(40, seed=5)
_SCHEMA = {"type": "object", "properties": {"w2": {"type": "integer"}}, "required": ["w2"]}


def _params(**params: Any) -> Request:
    """A prompt beyond the budget with odd sampling parameters."""
    return "/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4} | params}


def _body(**body: Any) -> Request:
    whole = {"input_ids": _SHORT, "sampling_params": {"max_new_tokens": 4}} | body
    return "/generate", {name: value for name, value in whole.items() if value is not None}


def _text(**params: Any) -> Request:
    return "/generate", {"text": "w5 w6 w7", "sampling_params": {"max_new_tokens": 4} | params}


def _nested(depth: int) -> str:
    return '{"input_ids": ' + "[" * depth + "]" * depth + "}"


REQUESTS: dict[str, Request] = {
    "no new tokens": _params(max_new_tokens=0),
    "fewer than none": _params(max_new_tokens=-1),
    "too many new tokens": _params(max_new_tokens=10**6),
    "2**63 new tokens": _params(max_new_tokens=2**63),
    "half a token": _params(max_new_tokens=1.5),
    "new tokens as text": _params(max_new_tokens="4"),
    "new tokens null": _params(max_new_tokens=None, stop_token_ids=list(range(VOCAB))),
    "n 0": _params(n=0),
    "n -1": _params(n=-1),
    "n 3": _params(n=3),
    "n as text": _params(n="two"),
    "temperature 0": _params(temperature=0.0),
    "temperature -1": _params(temperature=-1.0),
    "temperature 1e30": _params(temperature=1e30),
    "temperature 1e-30": _params(temperature=1e-30),
    "temperature as text": _params(temperature="hot"),
    "temperature NaN": ("/generate", '{"input_ids": [5], "sampling_params": {"temperature": NaN}}'),
    "top_p 0": _params(top_p=0.0),
    "top_p 2": _params(top_p=2.0),
    "top_k 0": _params(top_k=0),
    "top_k -2": _params(top_k=-2),
    "min_p 2": _params(min_p=2.0),
    "frequency_penalty 9": _params(frequency_penalty=9.0),
    "penalties": _params(frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.3),
    "min_new_tokens beyond": _params(min_new_tokens=8),
    "logit_bias": _params(logit_bias={"7": 5.0}),
    "logit_bias beyond the vocabulary": _params(logit_bias={str(VOCAB): 5.0}),
    "unknown parameter": _params(no_such_parameter=1),
    "parameters are a list": _body(sampling_params=[1, 2]),
    "parameters are text": _body(sampling_params="greedy"),
    "2,000 stop strings": _text(stop=[f"stop {i}" for i in range(2000)]),
    "empty stop string": _text(stop=[""]),
    "stop is a number": _text(stop=7),
    "stop tokens beyond the vocabulary": _params(stop_token_ids=[VOCAB, -1]),
    "regex": _text(regex=r"(w7 )+"),
    "broken regex": _text(regex="(((("),
    "JSON schema": _text(json_schema=json.dumps(_SCHEMA)),
    "broken JSON schema": _text(json_schema="{"),
    "two grammars": _text(regex="a", json_schema=json.dumps(_SCHEMA)),
    "no prompt": _body(input_ids=None),
    "empty prompt": _body(input_ids=[]),
    "text and ids": _body(text="w5"),
    "prompt of text and numbers": _body(input_ids=[5, "six"]),
    "fractions of ids": _body(input_ids=[5.5]),
    "ids as text": _body(input_ids="5 6 7"),
    "nested ids": _body(input_ids=[[[5]]]),
    "an empty prompt in a batch": _body(input_ids=[[5, 6], []]),
    "a batch": _body(input_ids=[_SHORT, PROMPT]),
    "an id beyond 64 bits": _body(input_ids=[5, 2**70]),
    "a prompt of the context": _body(input_ids=tokens(CONTEXT, seed=7)),
    "a prompt beyond the context": _body(input_ids=tokens(CONTEXT + 1, seed=7)),
    "a prompt far beyond the context": _body(input_ids=tokens(4 * CONTEXT, seed=7)),
    "unknown field": _body(no_such_field=1),
    "LoRA": _body(lora_path="/no/such/adapter"),
    "priority": _body(priority=3),
    "session": _body(session_params={"id": "no such session"}),
    "embeddings for ids": _body(input_ids=None, input_embeds=[[0.0] * 7]),
    "image": _body(image_data="no image"),
    "hidden states": _body(return_hidden_states=True),
    "logprobs": _body(return_logprob=True),
    "logprobs of the prompt": _body(return_logprob=True, logprob_start_len=0, top_logprobs_num=3),
    "logprobs from beyond": _body(return_logprob=True, logprob_start_len=10**6),
    "logprobs as text": _body(return_logprob=True, top_logprobs_num="many"),
    "fewer than no logprobs": _body(return_logprob=True, top_logprobs_num=-1),
    "logprobs of ids": _body(return_logprob=True, token_ids_logprob=[3, 4]),
    "logprobs of ids beyond": _body(return_logprob=True, token_ids_logprob=[VOCAB]),
    "the same id twice": _body(rid=["a", "a"], input_ids=[[5], [6]]),
    "id is a number": _body(rid=7),
    "stream as text": _body(stream="maybe"),
    "broken JSON": ("/generate", '{"input_ids": [5, 6'),
    "no JSON": ("/generate", "no JSON"),
    "nothing": ("/generate", ""),
    "an array": ("/generate", "[]"),
    "null": ("/generate", "null"),
    "not UTF-8": ("/generate", b'{"text": "\xff\xfe"}'),
    "deep JSON": ("/generate", _nested(100_000)),
    "abort of nothing": ("/abort_request", {}),
    "abort of an unknown id": ("/abort_request", {"rid": "no such request"}),
    "abort of a number": ("/abort_request", {"rid": 7}),
    "abort of all": ("/abort_request", {"rid": "", "abort_all": True}),
    "no such path": ("/no/such/path", {}),
    "completion": ("/v1/completions", {"model": "m", "prompt": "w5 w6", "max_tokens": 4}),
    "completion of n 0": ("/v1/completions", {"model": "m", "prompt": "w5", "n": 0}),
    "completion of nothing": ("/v1/completions", {"model": "m", "prompt": ""}),
    "completion of best_of": ("/v1/completions", {"prompt": "w5", "best_of": 3, "max_tokens": 4}),
    "chat of nobody": ("/v1/chat/completions", {"model": "m", "messages": []}),
    "chat of a wrong role": (
        "/v1/chat/completions",
        {"model": "m", "messages": [{"role": "nobody", "content": 5}]},
    ),
    "embedding": ("/v1/embeddings", {"model": "m", "input": "w5"}),
    "score": ("/v1/score", {"model": "m", "query": "w5", "items": ["w6"], "label_token_ids": [3]}),
}


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
def dense(model: Path, log_dir: Path) -> Iterator[Server]:
    log = log_dir / "http-native.log"
    with Server(model, log, *FLAGS, backend="torch_native", tokenizer=True) as server:
        yield server


@pytest.fixture(scope="module")
def sparse(model: Path, log_dir: Path) -> Iterator[Server]:
    with Server(model, log_dir / "http.log", *FLAGS, config=SPARSE, tokenizer=True) as server:
        yield server


def test_requests_are_answered_as_with_torch_native(dense: Server, sparse: Server) -> None:
    expected = statuses(dense)
    assert {200, 400, 404, 500} == set(expected.values())
    right = sparse.generate(PROMPT, 20).ids
    assert statuses(sparse) == expected
    sparse.flush_cache()
    assert sparse.generate(PROMPT, 20).ids == right
    assert_nothing_held(sparse)


def test_a_flush_under_load_is_refused_and_changes_nothing(sparse: Server) -> None:
    right = sparse.generate(PROMPT, 60).ids
    sparse.flush_cache()
    # This one runs until it is aborted, so the server is busy however slow this process is.
    with sparse.stream(tokens(100, seed=9), CONTEXT - 200) as events:
        next(events)
        with sparse.stream(PROMPT, 60) as answer:
            for event in answer:
                ids = event["output_ids"]
                assert requests.post(f"{sparse.url}/flush_cache", timeout=60).status_code == 400
    assert ids == right


def test_bench_serve_puts_both_under_the_same_load(
    model: Path, dense: Server, sparse: Server, command: Command, tmp_path: Path
) -> None:
    text, draw = tmp_path / "words.txt", random.Random(0)
    text.write_text(" ".join(f"w{draw.randrange(2, VOCAB)}" for _ in range(3000)))
    flags = ["--model", str(model), "--text", str(text), "--output", "6", "--requests", "4"]
    flags += ["--slo-ttft", "3600s", "--slo-tpot", "1us", "--shared-prefix", "0.5"]
    both = [*flags, "--url", f"{dense.url},{sparse.url}", "--context", "64,300"]
    report = command.json("bench", "serve", *both, "--concurrency", "2")
    short, long = report["cases"]
    assert (short["gate"], long["gate"]) == ("passed", "passed")
    for case in (short, long):
        for result in case["results"]:
            load = result["load"]
            assert (load["completed"], load["failed"]) == (4, 0)
            assert load["total_output_tokens"] == 4 * 6
            assert load["total_input_tokens"] == 4 * case["params"]["context"]
            assert 0 < load["median_ttft_ms"] <= load["p99_ttft_ms"]
            # An hour for the first token is met by all, a microsecond per token by none.
            assert load["request_goodput"] == 0
            assert result["memory"]["kv_tokens"] >= POOL - 100
    ours = [case["results"][1] for case in (short, long)]
    assert list(short["throughput_ratios"]) == [f"{dense.url}/{sparse.url}"]
    # Within the budget the same distribution, beyond it another; what is dense moves nothing.
    assert ours[0]["quality"]["kl"] < 1e-4 < ours[1]["quality"]["kl"]
    assert ours[0]["quality"]["agreement"] == 1.0
    assert ours[1]["cache"]["hit_pages"] > 0
    assert report["cases"][1]["results"][0]["cache"] == {}
    # Longer than its KV cache: refused, and counted.
    alone = ["--url", sparse.url, "--context", str(POOL + 50), "--rate", "50"]
    (case,) = command.json("bench", "serve", *flags, *alone, "--requests", "2")["cases"]
    assert case["gate"] == "not checked"
    assert case["ratios"] == case["throughput_ratios"] == {}
    (result,) = case["results"]
    assert (result["load"]["completed"], result["load"]["failed"]) == (0, 2)
    assert "refused" in case["params"]["failures"][sparse.url]


@more
@pytest.mark.skipif(
    not (DATASETS / "datasets").exists(),
    reason="not installed: make datasets, which make test does",
)
def test_sglangs_own_client_measures_this_server(
    model: Path, sparse: Server, tmp_path: Path
) -> None:
    """``python -m sglang.benchmark.serving``, with which docs say that a server is measured."""
    count, length, output, result = 6, 400, 12, tmp_path / "result.jsonl"
    names = ("hit_pages", "miss_pages")
    before = sum(sparse.counted(*names))
    client = [sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang"]
    client += ["--base-url", sparse.url, "--tokenizer", str(model)]
    client += ["--dataset-name", "random-ids", "--tokenize-prompt"]
    client += ["--random-input-len", str(length), "--random-output-len", str(output)]
    client += ["--random-range-ratio", "0.5", "--num-prompts", str(count)]
    client += ["--max-concurrency", "3", "--disable-tqdm", "--output-file", str(result)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(DATASETS), *sys.path])}
    done = subprocess.run(client, env=env, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = result.read_text().splitlines()
    measured = json.loads(line)
    assert measured["completed"] == count
    assert count * length // 2 <= measured["total_input_tokens"] <= count * length
    assert measured["total_output_tokens"] >= count * output // 2
    assert sum(sparse.counted(*names)) > before, "the requests were longer than the budget"
