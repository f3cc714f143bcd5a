"""The servers of `hisparse bench serve`: their flags, and what a run does when one fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from email.message import Message
from http.client import IncompleteRead
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import torch

from hisparse.config import HiSparseConfig
from hisparse.errors import ConfigError, HiSparseError
from hisparse_bench.load import bench, gate
from hisparse_bench.load.client import LoadRun, Prompts
from hisparse_bench.load.contenders import DENSE, SGLANG_HISPARSE, Contender, ServedModel
from hisparse_bench.load.gate import Comparison, Distance, Reference
from hisparse_bench.load.options import LoadOptions
from hisparse_bench.load.report import Usage
from hisparse_bench.server import RunningServer, ServerClient
from tests.command import Command

CHUNK = "--chunked-prefill-size"
TOKEN, INDEX_KEY, TOP_K, MIB = 1000, 200, 2048, 2**20


def contender(algorithm: str, *, indexed: bool = False, size: int | None = None) -> Contender:
    device = "cuda" if algorithm == SGLANG_HISPARSE else "cpu"
    return Contender(
        options=LoadOptions(context=(4000,), output=64, concurrency=(8,), device=device),
        model=ServedModel(
            folder="model",
            tokenizer=None,
            kv_token_bytes=TOKEN,
            longest=8192,
            index_token_bytes=INDEX_KEY if indexed else 0,
            index_top_k=TOP_K if indexed else None,
            stands_in_for_dense=indexed and device == "cpu",
        ),
        algorithm=algorithm,
        device_buffer_size=size,
    )


def value(flags: list[str], name: str) -> str:
    return flags[flags.index(name) + 1]


def config(flags: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(value(flags, "--hisparse-config"))
    return found


def test_a_dense_server_has_the_tokens_that_the_memory_holds() -> None:
    flags = contender(DENSE).flags(10 * MIB, 4096)
    assert int(value(flags, "--max-total-tokens")) == 10 * MIB // TOKEN
    assert value(flags, "--attention-backend") == "torch_native"
    assert value(flags, "--max-running-requests") == "8"
    assert "--hisparse-config" not in flags


def test_a_cpu_prefills_a_prompt_in_one_chunk_of_whole_pages() -> None:
    for algorithm, indexed in ((DENSE, False), ("quest", False), ("dsa", True)):
        chunk = int(value(contender(algorithm, indexed=indexed).flags(MIB, 9), CHUNK))
        assert chunk >= 4000 + 64 and chunk % 64 == 0
    assert CHUNK not in contender(SGLANG_HISPARSE, indexed=True).flags(MIB, 9)


def test_a_hisparse_server_has_the_memory_and_checks_with_all_tokens_in_its_budget() -> None:
    timed = contender("quest").flags(10 * MIB, 4096)
    assert value(timed, "--max-total-tokens") == "4096"
    found = HiSparseConfig.from_dict(config(timed))
    assert (found.algorithm, found.budget, found.device_memory) == ("quest", 512, 10 * MIB)
    exact = HiSparseConfig.from_dict(config(contender("quest").exact_flags(4096)))
    assert exact.budget >= 4000 + 64


def test_a_row_does_not_grow_beyond_the_swept_buffer() -> None:
    swept = contender("quest", size=1024)
    found = config(swept.flags(10 * MIB, 4096))
    assert found["device_buffer_size"] == found["max_row_capacity"] == 1024
    HiSparseConfig.from_dict(config(swept.exact_flags(4096)))


def test_the_stand_in_for_dense_keeps_requests_resident_and_says_so() -> None:
    dense = contender(DENSE, indexed=True)
    assert dense.name == "dsa, all resident"
    for flags in (dense.flags(10 * MIB, 4096), dense.exact_flags(4096)):
        found = config(flags)
        assert (found["algorithm"], found["budget"]) == ("dsa", TOP_K)
        assert found["device_buffer_size"] >= 4000 + 64


def test_the_hisparse_of_sglang_pays_for_index_keys_of_tokens_in_host_memory() -> None:
    upstream = contender(SGLANG_HISPARSE, indexed=True)
    timed, exact = upstream.flags(10 * MIB, 4096), upstream.exact_flags(4096)
    tokens = int(value(timed, "--max-total-tokens"))
    ratio = config(timed)["host_to_device_ratio"]
    cost = TOKEN + (ratio - 1) * INDEX_KEY
    assert tokens * cost <= 10 * MIB < (tokens + 1) * cost
    assert value(exact, "--max-total-tokens") == "4096"
    for flags in (timed, exact):
        assert "--enable-hisparse" in flags
        assert config(flags)["top_k"] == TOP_K
        assert config(flags)["device_buffer_size"] >= TOP_K


def running(**changed: Any) -> RunningServer:
    info = {"model_path": "/models/SmolLM2", "device": "cpu", "dtype": "auto"}
    info |= {"kv_cache_dtype": "auto"} | changed
    return RunningServer("http://host", info, None)


def test_a_running_server_says_its_model_dtype_and_budget() -> None:
    assert running().check_model("") == "/models/SmolLM2"
    assert (running().dtype, running().budget) == (None, None)
    assert running(dtype="bfloat16").dtype is torch.bfloat16
    assert running(dtype="bfloat16", kv_cache_dtype="fp8_e4m3").dtype is torch.float8_e4m3fn
    with pytest.raises(ConfigError, match="got 'owner/other', expected '/models/SmolLM2'"):
        running().check_model("owner/other")
    # A copy elsewhere has the tokenizer too.
    assert running().check_model("owner/SmolLM2") == "owner/SmolLM2"


def test_a_running_server_of_hisparse_needs_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(server: RunningServer) -> dict[str, float]:
        raise HTTPError(f"{server.url}/metrics", 404, "Not Found", Message(), None)

    info = {"model_path": "m", "device": "cpu", "dtype": "auto", "kv_cache_dtype": "auto"}
    info |= {"hisparse_config": None, "attention_backend": "hisparse"}
    monkeypatch.setattr(ServerClient, "info", lambda _: info)
    monkeypatch.setattr(ServerClient, "metrics", refuse)
    with pytest.raises(ConfigError, match="'http://host', a server of hisparse without metrics"):
        RunningServer.connect("http://host")
    # A dense one needs none.
    info["attention_backend"] = "torch_native"
    assert RunningServer.connect("http://host").budget is None


class Forks:
    """In place of the process that forks servers."""

    def __init__(self, *_: object) -> None:
        pass

    def stop(self) -> None:
        pass


class Server:
    """Stands in for a process; ``broken`` says of its flags whether a "start" or "load" fails."""

    url = "http://stand-in"
    broken: Callable[[list[str]], str] = staticmethod(lambda flags: "")
    log: list[str]

    def __init__(self, folder: str, log: Path, flags: list[str], forks: Forks) -> None:
        self.kind = config(flags)["algorithm"] if "--hisparse-config" in flags else DENSE
        self.how = type(self).broken(flags)

    @staticmethod
    def cpu_environment(_: int) -> dict[str, str]:
        return {}

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, _: dict[str, str]) -> None:
        self.log.append(f"start {self.kind}")
        if self.how == "start":
            raise HiSparseError("SGLang did not come up\nMemoryError: no room")

    def generate(self, prompts: list[list[int]], count: int, **_: Any) -> list[Any]:
        self.log.append(f"{self.kind} {count}")
        return []

    def flush_cache(self) -> None:
        if self.how == "load":
            raise ConnectionRefusedError("nobody listens")


def one_token(*_: str, **__: bool) -> dict[str, list[int]]:
    return {"input_ids": [1]}


TIMES = ("ttft", "tpot", "e2e_latency")
FLAGS = ["bench", "serve", "--context", "1024", "--algorithm", "dense,quest"]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> type[Server]:
    model = ServedModel(folder="m", tokenizer=None, kv_token_bytes=TOKEN, longest=8192)
    fields = {"completed": 1, "failed": 0, "errors": [], "output_throughput": 5.0}
    rates = ("input_throughput", *(f"{x}_{y}_ms" for x in ("median", "p99") for y in TIMES))
    run = LoadRun(fields=fields | dict.fromkeys(rates, 1.0), tpot_s=[0.5])
    monkeypatch.setattr(bench, "ServerProcess", Server)
    monkeypatch.setattr(bench, "ForkServer", Forks)
    monkeypatch.setattr(Server, "log", log := [], raising=False)

    def measure(server: Server, *_: object) -> Distance:
        log.append(f"{server.kind} distance")
        return Distance(kl=0.0, agreement=1.0, positions=1)

    def load(*_: object) -> LoadRun:
        log.append("load")
        return run

    monkeypatch.setattr(bench, "run_load", load)
    for name, found in {
        "measure_reference": lambda *_: Reference([1], [2], [{}]),
        "measure_steps": lambda *_: [],
        "measure_distance": measure,
        "compare_answers": lambda *_: Comparison(compared=9, failure=None),
    }.items():
        monkeypatch.setattr(gate, name, found)
    monkeypatch.setattr(bench.ServedModel, "load", lambda *_: model)
    monkeypatch.setattr(bench.Prompts, "of", lambda *_: Prompts(one_token, range(5000)))
    monkeypatch.setattr(bench.Usage, "read", lambda *_: Usage({}, 7))
    return Server


def test_every_server_answers_before_its_first_load(
    servers: type[Server], command: Command
) -> None:
    (case,) = command.json(*FLAGS, "--device-buffer-size", "512,1024")["cases"]
    # The check starts one server of each algorithm, whatever the sizes of its buffers.
    checked = ["start dense", "start quest"]
    dense = ["start dense", "dense 8", "load"]
    # The distance of two prompts, once for all sizes, and before the load: its answers stay cached.
    first = ["start quest", "quest 8", "quest distance", "quest distance", "load"]
    quest = [*first, "start quest", "quest 8", "load"]
    assert servers.log == [*checked, *dense, *quest]
    assert [x["impl"] for x in case["results"]] == [
        "dense",
        "quest, buffer 512",
        "quest, buffer 1024",
    ]
    assert case["params"]["compared_tokens"] == 9
    assert (case["params"]["dense_requests"], case["params"]["dense_holds"]) == (1, 1)


def test_a_server_that_ends_during_a_load_is_named_and_the_others_are_measured(
    servers: type[Server], monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    dense = staticmethod(lambda flags: "load" if "torch_native" in flags else "")
    monkeypatch.setattr(servers, "broken", dense)
    (case,) = command.json(*FLAGS)["cases"]
    assert case["params"]["failures"] == {"dense": "ConnectionRefusedError: nobody listens"}
    assert [x["impl"] for x in case["results"]] == ["quest"]


def test_a_run_without_a_result_is_no_success(
    servers: type[Server], monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    timed = staticmethod(lambda flags: "start" if servers.log[1:] else "")
    monkeypatch.setattr(servers, "broken", timed)
    (case,) = command.json(*FLAGS, code=1)["cases"]
    assert set(case["params"]["failures"]) == {"dense", "quest"}


@pytest.mark.parametrize("error", [ConnectionResetError("gone"), IncompleteRead(b"", 9)])
def test_a_server_that_ends_during_the_check_fails_its_run_and_the_next_one_goes_on(
    servers: type[Server],
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
    tmp_path: Path,
    error: Exception,
) -> None:
    calls = []

    def answer(*_: object) -> Comparison:
        calls.append(_)
        if len(calls) == 1:
            raise error
        return Comparison(compared=9, failure=None)

    monkeypatch.setattr(gate, "compare_answers", answer)
    about = "".join(f'{x} = "x"\n' for x in ("title", "published", "cpu_says", "cpu_does_not_say"))
    run = '[[run]]\ncontext = {}\nalgorithm = ["dense", "quest"]\n'
    file = tmp_path / "two.toml"
    file.write_text(about + run.format(1024) + run.format(2048))
    out, err = command.run("bench", "serve", "--json", "--recipe", str(file), code=1)
    failed, passed = json.loads(out)["cases"]
    assert (failed["gate"], failed["results"]) == ("failed", [])
    why = f"quest failed during the check: {type(error).__name__}: {error}"
    assert failed["params"]["failure"] == why
    assert why in err
    assert (passed["gate"], len(passed["results"])) == ("passed", 2)


def test_memory_for_dense_requests_counts_their_common_prefix_once(
    servers: type[Server], monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    sizes: list[int] = []

    def read(flags: list[str]) -> str:
        if "torch_native" in flags:
            sizes.append(int(value(flags, "--max-total-tokens")))
        return ""

    monkeypatch.setattr(servers, "broken", staticmethod(read))
    load = ["--output", "48", "--shared-prefix", "0.75", "--concurrency", "8"]
    cases = command.json(*FLAGS, *load, "--dense-requests", "1,2,4,8")["cases"]
    each = 256 + 48 + 16
    assert sizes[1:] == [768 + count * each for count in (1, 2, 4, 8)]
    params = [x["params"] for x in cases]
    assert [x["dense_requests"] for x in params] == [1, 2, 4, 8]
    assert [x["dense_holds"] for x in params] == [1, 2, 4, 8]


def test_a_request_of_the_stand_in_for_dense_takes_more_than_its_kv(
    servers: type[Server], monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    model = ServedModel(
        folder="m",
        tokenizer=None,
        kv_token_bytes=TOKEN,
        longest=8192,
        index_top_k=512,
        stands_in_for_dense=True,
    )
    monkeypatch.setattr(bench.ServedModel, "load", lambda *_: model)
    flags = ["bench", "serve", "--context", "1024", "--algorithm", "dense,dsa"]
    load = ["--output", "48", "--shared-prefix", "0.75", "--concurrency", "8"]
    cases = command.json(*flags, *load, "--dense-requests", "1,2")["cases"]
    params = [x["params"] for x in cases]
    assert [x["dense_holds"] for x in params] == [1, 2]
    for count, found in enumerate(params, 1):
        assert found["device_memory"] > 1.1 * count * (1024 + 48) * TOKEN


def test_the_state_of_a_run_is_a_line_for_each_server(
    servers: type[Server], command: Command
) -> None:
    _, err = command.run(*FLAGS)
    for i, name in enumerate(("the check, dense", "the check, quest", "dense", "quest"), 1):
        assert f"server {i} of 4: starting the server of {name}" in err
    assert "takes most of a short run; --no-quality leaves it out" in err


def test_without_the_check_a_run_is_only_its_loads_and_no_gate_has_passed(
    servers: type[Server], command: Command
) -> None:
    out, err = command.run(*FLAGS, "--no-quality", "--json")
    assert servers.log == [
        "start dense", "dense 8", "load", "start quest", "quest 8", "load"
    ]  # fmt: skip
    assert "server 2 of 2: starting the server of quest" in err
    (case,) = json.loads(out)["cases"]
    assert case["gate"] == "not checked"
    assert case["ratios"] == case["throughput_ratios"] == {}
    assert [(x["impl"], x["quality"]) for x in case["results"]] == [("dense", {}), ("quest", {})]
    assert case["params"]["compared_tokens"] is None
    said = command(*FLAGS, "--no-quality")
    before, figures = said.split("not checked against dense decoding, so no ratios")
    assert ("out/s" in figures, "out/s" in before) == (True, False)
    assert "dense/quest" not in said


def test_servers_may_run_all_requests_of_a_trace_at_once(
    command: Command, servers: type[Server], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    request = {"timestamp": 0, "input_length": 512, "output_length": 2, "hash_ids": [1]}
    file = tmp_path / "trace.jsonl"
    file.write_text((json.dumps(request) + "\n") * 11)
    seen = []
    monkeypatch.setattr(servers, "broken", staticmethod(lambda flags: seen.append(flags) or ""))
    command("bench", "serve", "--trace", str(file))
    assert {value(flags, "--max-running-requests") for flags in seen} == {"11"}
