"""The parts of `hisparse bench serve` that need no server."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hisparse.cli import main
from hisparse.errors import ConfigError, HiSparseError
from hisparse_bench.load import bench, gate
from hisparse_bench.load.client import Prompts, _summarise
from hisparse_bench.load.gate import (
    Distance,
    Reference,
    compare_answers,
    measure_distance,
    measure_reference,
)
from hisparse_bench.load.options import LoadOptions, read_recipe, recipe_names
from hisparse_bench.load.report import UNCHECKED, LoadReport, LoadResult, Usage
from hisparse_bench.report import Case
from tests.command import Command
from tests.processes import is_running, wait_until


class Words:
    """A tokenizer: each character is a token."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}


class Answers:
    """A server that gives prepared answers."""

    def __init__(self, *answers: list[dict[str, Any]]) -> None:
        self._answers = list(answers)

    def generate(self, *_: Any, **__: Any) -> list[dict[str, Any]]:
        return self._answers.pop(0)


def prompts() -> Prompts:
    return Prompts(Words(), list(range(1000, 3000)))


def test_prompts_share_exactly_the_prefix() -> None:
    first, second = prompts().equal(2, 100, 0.6, 8)
    assert len(first.ids) == len(second.ids) == 100
    assert first.ids[:60] == second.ids[:60]
    assert first.ids[60] != second.ids[60]


def test_requests_of_a_trace_share_blocks_with_the_same_hash(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 500, "input_length": 1100, "output_length": 4, "hash_ids": [7, 8, 10]},
        {"timestamp": 0, "input_length": 1024, "output_length": 9, "hash_ids": [7, 9]},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    early, late = prompts().trace(str(file), 0, 4096)
    assert [early.arrival_ms, late.arrival_ms] == [0, 500]
    assert [len(early.ids), early.output] == [1024, 9]
    assert early.ids[:512] == late.ids[:512]
    assert early.ids[512:] != late.ids[512:1024]
    assert len(late.ids) == 1100


def test_a_recorded_trace_has_its_own_blocks_and_a_part_of_one_at_its_end(tmp_path: Path) -> None:
    about = {"format": "hisparse prefix 1", "source": "recorded", "note": "", "block_size": 32}
    line = {"input_length": 70, "output_length": 4, "hash_ids": [3, 4]}
    lines = [about, line | {"timestamp": 0}, line | {"timestamp": 5}]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    first, second = prompts().trace(str(file), 0, 4096)
    assert len(first.ids) == len(second.ids) == 70
    assert first.ids[:64] == second.ids[:64]
    assert first.ids[64:] != second.ids[64:]
    about["block_size"] = 4
    short = {"timestamp": 0, "input_length": 8, "output_length": 4, "hash_ids": [3, 4]}
    file.write_text("\n".join(map(json.dumps, [about, short])))
    with pytest.raises(ConfigError, match="got blocks of 4 tokens, expected"):
        prompts().trace(str(file), 0, 4096)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "expected an object"),
        (
            '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1]}',
            "got 1 hash_ids for 1024 tokens",
        ),
        (
            '{"timestamp": 0, "input_length": 5000, "output_length": 1, "hash_ids": [1]}',
            "at most 4096",
        ),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigError, match=f"(line|request) 1.*{message}"):
        prompts().trace(str(file), 0, 4096)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--slo-ttft", "2"], "expected a time above 0"),
        (["--concurrency", "2", "--rate", "1"], "expected one of them"),
        (["--device-memory", "1GiB", "--dense-requests", "1"], "expected one of them"),
        (["--device-memory", "lots"], "expected a size"),
        (["--device", "tpu"], "expected cpu or cuda"),
        (["--shared-prefix", "1"], r"expected \[0, 1\)"),
        (["--url", "localhost"], "expected such as http"),
        (["--url", "http://127.0.0.1:9", "--budget", "64"], "got --url and --budget"),
        (["--url", "http://127.0.0.1:9", "--algorithm", "quest"], "got --url and --algorithm"),
        (["--url", "http://127.0.0.1:9", "--threads", "1"], "got --url and --threads"),
        (["--url", "http://127.0.0.1:9", "--device-buffer-size", "64"], "--device-buffer-size"),
        (["--trace", "t.jsonl", "--context", "64"], "got --trace and --context"),
        (["--trace", "t.jsonl", "--output", "64"], "got --trace and --output"),
        (["--trace", "t.jsonl", "--shared-prefix", "0.5"], "got --trace and --shared-prefix"),
        (["--recipe", "seed-thruput"], "did you mean 'seed-throughput'"),
        (["--recipe", "none.toml"], "cannot read"),
    ],
)
def test_wrong_input_is_one_line(flags: list[str], message: str, command: Command) -> None:
    line = command.refused("bench", "serve", *flags)
    assert re.search(message, line), line


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_can_be_read_and_say_what_they_mean(name: str) -> None:
    recipe = read_recipe(name, {"device": "cuda", "concurrency": [3]})
    assert all(recipe.about.values())
    assert all(run.device == "cuda" and run.loads == [{"concurrency": 3}] for run in recipe.runs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title = ", "got .*, expected TOML"),
        ("ttle = 'x'", "got key 'ttle'"),
        ("title = 'x'", "published: got None"),
    ],
)
def test_a_damaged_recipe_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_recipe(str(file), {})


@pytest.mark.parametrize("name", ["requests", "threads", "device_buffer_size"])
def test_a_negative_number_of_a_recipe_is_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}: got -1, expected"):
        LoadOptions.read("recipe", {name: -1})


@pytest.mark.parametrize("name", recipe_names())
def test_flags_take_the_place_of_what_a_recipe_says_of_servers_or_prompts(name: str) -> None:
    for run in read_recipe(name, {"url": ["http://127.0.0.1:9"]}).runs:
        assert (run.model, run.device_memory, run.dense_requests) == ("", (), ())
    for run in read_recipe(name, {"trace": "t.jsonl"}).runs:
        assert run.trace == "t.jsonl" and not run.dense_requests and not run.shared_prefix


def test_an_unknown_option_of_a_recipe_names_the_close_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'context'"):
        LoadOptions.read("recipe", {"contxt": [1]})


@pytest.mark.parametrize(
    ("answer", "compared", "failure"),
    [
        ([4, 5, 6], 3, None),
        ([4, 8, 1], 1, "only 1 tokens could be compared before ties, expected 3 or more"),
        ([4, 9, 6], 1, "token 1 of an answer is not the dense one"),
        ([4, 5], 2, "token 2 of an answer is not the dense one"),
    ],
    ids=["equal", "a tie within rounding", "another token", "too short"],
)
def test_compare_answers(answer: list[int], compared: int, failure: str | None) -> None:
    steps = [{4: -0.1}, {5: -0.5, 8: -0.5005, 9: -1.0}, {6: -0.1}]
    reference = Reference([1, 2], [4, 5, 6], steps)
    found = compare_answers(Answers([{"output_ids": answer}]), [reference], "cpu")
    assert (found.compared, found.failure) == (compared, failure)


def test_a_tie_ends_one_comparison_and_the_others_count() -> None:
    tied, equal = Reference([1], [4], [{4: -0.5, 8: -0.5}]), Reference([1], [5] * 8, [{}] * 8)
    answers = Answers([{"output_ids": [8]}], [{"output_ids": [5] * 8}])
    found = compare_answers(answers, [tied, equal], "cpu")
    assert (found.compared, found.failure) == (8, None)


def test_distance_is_the_divergence_over_the_likeliest_tokens_and_the_rest() -> None:
    half, quarter = math.log(0.5), math.log(0.25)
    reference = Reference([1], [4, 5, 6], [])
    forced = [
        {"output_ids": [4, 5], "meta_info": {"output_token_ids_logprobs": [[], [[half, 5, None]]]}},
        {"output_ids": [5, 7], "meta_info": {"output_token_ids_logprobs": [[], [[half, 6, None]]]}},
    ]
    found = measure_distance(Answers([], forced), reference, [{5: half}, {6: quarter}])
    expected = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert found == Distance(kl=pytest.approx(expected / 2), agreement=0.5, positions=2)
    assert gate.NUM_TOKENS > 2


def test_an_answer_that_was_broken_off_is_an_error_of_its_server() -> None:
    answer = {"output_ids": [4], "meta_info": {"output_top_logprobs": [], "finish_reason": "abort"}}
    with pytest.raises(HiSparseError, match="got 0 for 1 tokens, finished by abort"):
        measure_reference(Answers([answer]), [1], 1)


def result(impl: str, rate: float) -> LoadResult:
    load = {"completed": 1, "failed": 0, "output_throughput": rate} if rate else {"completed": 0}
    memory = {"device_bytes": 1, "host_bytes": 0, "kv_tokens": 1}
    return LoadResult(impl=impl, median_us=2.0, p10_us=1.0, p90_us=3.0, load=load, memory=memory)


def case(kind: str, *results: LoadResult) -> Case:
    return Case(name="m", params={"model": "m"}, gate=kind, results=list(results))


def test_no_ratio_without_a_check_and_no_figure_of_a_failed_one() -> None:
    both = result("dense", 10.0), result("sketch", 40.0), result("quest", 0.0)
    cases = [case(kind, *both) for kind in ("passed", UNCHECKED, "failed")]
    report = LoadReport(command="bench serve", device="cpu", cases=cases)
    passed, unchecked, failed = json.loads(report.to_json())["cases"]
    assert passed["throughput_ratios"] == {"dense/sketch": 0.25}
    assert unchecked["ratios"] == unchecked["throughput_ratios"] == {}
    assert len(unchecked["results"]) == 3
    assert failed["results"] == []


def test_a_load_without_an_answer_has_no_times() -> None:
    cases = [case("passed", result("dense", 10.0), result("quest", 0.0))]
    report = LoadReport(command="bench serve", device="cpu", cases=cases)
    dense, quest = json.loads(report.to_json())["cases"][0]["results"]
    assert (dense["median_us"], quest["median_us"], quest["p90_us"]) == (2.0, None, None)


def test_a_hit_ratio_needs_a_selected_page() -> None:
    metrics = {"hisparse:device_kv_bytes": 1.0, "hisparse:hit_pages_total": 6.0}
    before, after = Usage(metrics, 1), Usage(metrics | {"hisparse:hit_pages_total": 9.0}, 1)
    assert "hit_ratio" not in before.moved_since(before)
    assert after.moved_since(before)["hit_ratio"] == 1.0


def test_an_answer_that_breaks_off_is_no_success() -> None:
    class Output:
        success, ttft, itl, error = True, 0.0, [], ""
        output_len, latency, start_time = 8, 1.0, 0.0

    class Row:
        output_len = 8

    run = _summarise(None, [Row()], [Output()], 1.0, None, {})
    assert (run.fields["completed"], run.fields["failed"]) == (0, 1)
    assert run.fields["errors"] == ["refused or broken off: got 0 of 8 tokens"]


def test_an_interrupted_run_prints_what_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        device = "cpu"

        def __init__(self, *_: Any) -> None:
            self.cases: list[Case] = []

        def run(self) -> None:
            self.cases.append(case("passed", result("dense", 10.0)))
            sys.exit(143)

    monkeypatch.setattr(bench, "LoadBench", Interrupted)
    with pytest.raises(SystemExit, match="143"):
        main(["bench", "serve", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["interrupted"] is True
    assert [entry["gate"] for entry in report["cases"]] == ["passed"]


#: A bench that has started a server; the server says where, and does not end by itself.
STARTS = """
import sys
from pathlib import Path
import hisparse_bench.load.bench as bench
from hisparse.cli import main
from hisparse_bench.server import ServerProcess

class Bench:
    device = "cpu"
    def __init__(self, *_):
        self.cases = []
    def run(self):
        with ServerProcess("a-model", Path(sys.argv[1]) / "log", []) as server:
            server.start({"PYTHONPATH": str(Path(sys.argv[1]) / "fake")})

bench.LoadBench = Bench
sys.exit(main(["bench", "serve"]))
"""
NEVER_UP = """
import os, sys, time
from pathlib import Path
if (child := os.fork()) == 0:
    time.sleep(600)
Path(sys.argv[0]).with_name("pids").write_text(f"{os.getpid()} {child} ")
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    package = tmp_path / "fake" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(NEVER_UP)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", STARTS, str(tmp_path)], env=env, stderr=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 300
    pids = package / "pids"
    while not pids.exists() or not pids.read_text().endswith(" "):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    # As `timeout` does: to the process and to its group.
    process.send_signal(number)
    process.send_signal(number)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert "Traceback" not in errors
    left = pids.read_text().split()
    wait_until(lambda: not any(is_running(int(pid)) for pid in left), "a process is left", 300)
