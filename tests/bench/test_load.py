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
from hisparse.errors import ConfigError
from hisparse_bench.load import bench, gate
from hisparse_bench.load.client import _summarise
from hisparse_bench.load.gate import Distance, Reference, first_difference, measure_distance
from hisparse_bench.load.options import LoadOptions
from hisparse_bench.load.plot import draw
from hisparse_bench.load.prompts import Prompts
from hisparse_bench.load.recipes import read_recipe, recipe_names
from hisparse_bench.load.report import UNCHECKED, LoadReport, LoadResult
from hisparse_bench.report import Case


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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "expected an object"),
        ('{"timestamp": 0}', "lacks hash_ids, input_length, output_length"),
        (
            '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}',
            "got 1 hash_ids for 600 tokens",
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
    with pytest.raises(ConfigError, match=f"line 1.*{message}"):
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
        (["--recipe", "seed-thruput"], "did you mean 'seed-throughput'"),
        (["--recipe", "none.toml"], "cannot read"),
    ],
)
def test_wrong_input_is_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line), line


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_can_be_read_and_say_what_they_mean(name: str) -> None:
    recipe = read_recipe(name, {"device": "cuda", "concurrency": [3]})
    assert all(recipe.about.values())
    assert all(run.device == "cuda" and run.loads == [{"concurrency": 3}] for run in recipe.runs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title = ", "not TOML"),
        ("ttle = 'x'", "got key 'ttle'"),
        ("title = 'x'", "published: got None"),
    ],
)
def test_a_damaged_recipe_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_recipe(str(file), {})


def test_an_unknown_option_of_a_recipe_names_the_close_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'context'"):
        LoadOptions.read("recipe", {"contxt": [1]})


@pytest.mark.parametrize(
    ("answer", "place"),
    [([4, 5, 6], None), ([4, 8, 1], None), ([4, 9, 6], 1), ([4, 5], 2)],
    ids=["equal", "a tie within rounding", "another token", "too short"],
)
def test_first_difference(answer: list[int], place: int | None) -> None:
    steps = [{4: -0.1}, {5: -0.5, 8: -0.5005, 9: -1.0}, {6: -0.1}]
    reference = Reference([1, 2], [4, 5, 6], steps)
    assert first_difference(Answers([{"output_ids": answer}]), reference, "cpu") == place


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


def result(impl: str, rate: float) -> LoadResult:
    load = {"completed": 1, "failed": 0, "output_throughput": rate} if rate else {"completed": 0}
    memory = {"device_bytes": 1, "host_bytes": 0, "kv_tokens": 1}
    return LoadResult(impl=impl, median_us=2.0, p10_us=1.0, p90_us=3.0, load=load, memory=memory)


def case(kind: str, *results: LoadResult) -> Case:
    params = {"model": "m", "context": 64, "concurrency": 2, "device_memory": 2**20}
    return Case(name="m", params=params, gate=kind, results=list(results))


def test_no_ratio_without_a_check_and_no_figure_of_a_failed_one() -> None:
    both = result("dense", 10.0), result("sketch", 40.0), result("quest", 0.0)
    cases = [case(kind, *both) for kind in ("passed", UNCHECKED, "failed")]
    report = LoadReport(command="bench serve", device="cpu", cases=cases)
    passed, unchecked, failed = json.loads(report.to_json())["cases"]
    assert passed["throughput_ratios"] == {"dense/sketch": 0.25}
    assert unchecked["ratios"] == unchecked["throughput_ratios"] == {}
    assert len(unchecked["results"]) == 3
    assert failed["results"] == []
    # In each of two panels, two lines have two points and one in the legend.
    assert draw(report).count("<circle") == 2 * 2 * (2 + 1)


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
    end = time.monotonic() + 60
    pids = package / "pids"
    while not pids.exists() or not pids.read_text().endswith(" "):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    # As `timeout` does: to the process and to its group.
    process.send_signal(number)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "Traceback" not in errors
    while any(map(_runs, pids.read_text().split())):
        assert time.monotonic() < end, "a process is left"
        time.sleep(0.05)


def _runs(pid: str) -> bool:
    """Whether a process runs; one that has ended but that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
