"""``make gpu-check``: what it says and leaves out; the GPU's part of it runs only where one is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hisparse.kernels.operation import OPERATIONS
from hisparse_bench.decode import DecodeBench
from hisparse_bench.report import Case
from scripts.gpu_check import (
    BENCHES,
    PARTS,
    ROOT,
    SUITES,
    Check,
    describe,
    estimate_speeds,
    print_speeds,
    run_part,
)
from tests.kernels.conftest import CUDA_TESTS
from tests.kernels.gpu.small_case import select_by_sketches

PYTHON = sys.executable
LONG = 131072


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        pytest.param(
            ["scripts/gpu_check.py"],
            "gpu-check: error: PyTorch finds no CUDA GPU here, expected one",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to check"),
        ),
        # Without the packages of the environment.
        (["-I", "-S", "scripts/gpu_check.py"], "has no PyTorch; expected a Python that has it"),
        (
            ["scripts/gpu_check.py", "--part", "speed"],
            "gpu-check: error: --part: got 'speed', expected one of kernels, ",
        ),
    ],
    ids=["no GPU", "no PyTorch", "unknown part"],
)
def test_what_it_cannot_do_is_one_line(flags: list[str], words: str) -> None:
    done = subprocess.run([PYTHON, *flags], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert words in line


def test_a_machine_without_nvcc_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may come from the cache."""
    monkeypatch.setattr("hisparse.kernels.build.cuda.find_nvcc", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    monkeypatch.setenv("PATH", "/usr/bin")
    assert describe(torch)["nvcc"] == []


def test_a_step_passes_fails_or_runs_out_of_time(capsys: pytest.CaptureFixture[str]) -> None:
    check = Check(30, dict(os.environ))
    assert check.run("good", [PYTHON, "-c", "print(1)"], 20)["status"] == "passed"
    bad = check.run("bad", [PYTHON, "-c", "raise SystemExit('wrong')"], 20)
    assert (bad["status"], bad["output"].strip()) == ("failed", "wrong")
    late = check.run("late", [PYTHON, "-c", "import time; time.sleep(60)"], 2)
    assert (late["status"], late["output"].strip()) == ("failed", "not done in 2 s")
    assert [check.failed(name) for name in ("good", "bad", "late", "none")] == [
        False,
        True,
        True,
        False,
    ]
    assert Check(0, {}).run("no time", [PYTHON], 5)["status"] == "skipped"
    assert "wrong" in capsys.readouterr().out


def test_no_speed_of_a_kernel_whose_tests_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the transfers' tests pass: only the benchmark of the transfers is run."""
    check = Check(30, {})
    asked: list[str] = []

    def run(name: str, command: list[str], limit_s: float) -> dict[str, object]:
        asked.append(name)
        status = "failed" if name in ("lru", "attention") else "passed"
        return check._keep({"step": name, "status": status, "seconds": 0.0, "output": ""})

    monkeypatch.setattr(check, "run", run)
    for part in PARTS:
        run_part(part, check)
    benches = {f"bench {name}" for name in BENCHES}
    assert benches & set(asked) == {"bench transfer"}
    skipped = {s["step"] for s in check.steps if s["status"] == "skipped"}
    assert benches - {"bench transfer"} <= skipped
    # Alone, a benchmark's own check decides.
    alone = Check(30, {})
    asked.clear()
    monkeypatch.setattr(alone, "run", run)
    run_part("bench-kernels", alone)
    assert {f"bench {name}" for name in PARTS["bench-kernels"]} <= set(asked)


def test_every_step_is_in_one_part() -> None:
    steps = [name for names in PARTS.values() for name in names]
    assert sorted(steps) == sorted(
        [*SUITES, *BENCHES, "served", "served load", "memcheck", "racecheck"]
    )


@pytest.mark.parametrize("dim", [64, 128, 256, 576])
def test_the_small_case_selects(dim: int) -> None:
    """On a CPU: that compute-sanitizer has something to look at."""
    pages, lengths = select_by_sketches(dim, "cpu")
    assert lengths.tolist() == [[9] * pages.shape[1], [7] * pages.shape[1]]


def test_each_operation_of_a_gpu_is_tested() -> None:
    suite = [ROOT / "tests/kernels" / file for files in SUITES.values() for file in files]
    text = "\n".join(file.read_text() for file in suite)
    of_a_gpu = {name for name, op in OPERATIONS.items() if op.lookup("cuda") or op.lookup("triton")}
    assert {"sketch_score", "chunk_index_score", "rebalance", "paged_attention"} <= of_a_gpu
    assert {name for name in of_a_gpu if not re.search(rf"\b{name}\(", text)} == set()
    assert {file.stem for file in suite} >= CUDA_TESTS


def test_the_table_holds_only_what_passed(capsys: pytest.CaptureFixture[str]) -> None:
    result = {"impl": "cuda", "median_us": 12.5, "gb_s": 33.0}
    output = json.dumps({"cases": [{"results": [result]}]})
    steps = [
        {"step": "bench a", "status": "passed", "output": output},
        {"step": "bench b", "status": "failed", "output": output},
        {"step": "lru", "status": "passed", "output": "7 passed"},
    ]
    print_speeds(steps, {})
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split() == ["bench", "a", "cuda", "12.5", "us", "33.0", "GB/s"]


def test_an_estimate_stands_beside_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    """By the parameters that the benchmark itself reports."""
    bench = DecodeBench(context=LONG, batch=8, dtype=torch.bfloat16)
    results = [{"impl": i, "median_us": 300.0, "gb_s": None} for i in ("cuda", "sdpa", "torch")]
    case = {"name": "decode", "params": bench._params() | {"miss_ratio": 0.15}, "results": results}
    steps = [{"step": "bench decode", "status": "passed", "output": json.dumps({"cases": [case]})}]
    found = estimate_speeds(steps, "NVIDIA H100 80GB HBM3")
    print_speeds(steps, found)
    ours, dense, other = (line.split("us", 1)[1] for line in capsys.readouterr().out.splitlines())
    assert ours.split() == ["estimated", f"{found['bench decode']['cuda']:.1f}", "us"]
    assert float(dense.split()[1]) == pytest.approx(1430, rel=0.15)
    assert not other.strip()
    assert estimate_speeds(steps, "NVIDIA A100-SXM4-80GB") == {}


def test_a_model_with_an_indexer_has_an_estimate() -> None:
    bench = DecodeBench(context=LONG, batch=8, q_heads=128, algorithm="dsa")
    case = {"name": "decode", "params": bench._params() | {"miss_ratio": 0.15}}
    output = json.dumps({"cases": [case, case | {"name": "swap-in"}]})
    steps = [{"step": "bench decode", "status": "passed", "output": output}]
    found = estimate_speeds(steps, "NVIDIA GB200")
    assert 0 < found["bench decode"]["cuda"] < found["bench decode"]["sdpa"]


def test_every_suite_names_files_that_are_there() -> None:
    for files in SUITES.values():
        assert all((ROOT / "tests" / "kernels" / file).exists() for file in files)
    for parts, _ in BENCHES.values():
        assert set(parts) <= set(SUITES)


def test_the_gpu_s_proxy_writes_back_what_an_operation_wrote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here without a GPU: the copies are made on the CPU, the rest is as it runs there."""
    from hisparse.kernels import gather_pages
    from hisparse.kernels.operation import IMPLEMENTATIONS
    from hisparse.types import PagedKV
    from tests.kernels.gpu import on_gpu

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(on_gpu, "DEVICE_MEMORY", {})
    monkeypatch.setattr(on_gpu, "PINNED_MEMORY", {})
    through = on_gpu._through_copies
    monkeypatch.setitem(
        IMPLEMENTATIONS,
        on_gpu.ON_GPU,
        lambda op, place: through(op.function("cpu"), op),
    )
    src = PagedKV(*torch.randn(2, 5, 1, 4, 8))
    dst = PagedKV(*torch.zeros(2, 5, 1, 4, 8))
    pages = torch.tensor([[3, -1, 0]], dtype=torch.int32)
    gather_pages(src, pages, dst, torch.tensor([[0, 1, 4]], dtype=torch.int32), impl=on_gpu.ON_GPU)
    assert torch.equal(dst.k[0], src.k[3])
    assert torch.equal(dst.v[4], src.v[0])
    assert not dst.k[1].any()
    copies, latent = on_gpu._Copies(), torch.randn(5, 1, 4, 8)
    k, v = (copies.of(x, pinned=False) for x in (latent, latent[..., :6]))
    assert v.data_ptr() == k.data_ptr() != latent.data_ptr()
    assert torch.equal(v, latent[..., :6])


def test_the_proxy_compares_tensors_of_one_element() -> None:
    """They count as contiguous whatever their strides, but a view as bytes is refused."""
    from tests.kernels.gpu.on_gpu import _bits

    one = torch.empty_strided((1,), (4,))
    assert one.is_contiguous()
    assert torch.equal(_bits(one.fill_(1.0)), torch.ones(1).view(torch.uint8))
    assert torch.equal(_bits(torch.arange(6).view(2, 3).T), _bits(torch.tensor([0, 3, 1, 4, 2, 5])))


def test_the_served_gate_compares_graphs_with_eager_steps() -> None:
    from hisparse.config import HiSparseConfig
    from hisparse_bench.server import Generation
    from tests.kernels.gpu import served

    def gate(absent: str = "", **ids: list[int]) -> str:
        runs = {
            name: [Generation("", ids.get(name, [5, 6]), [1.0, 2.0, 2.5], 9, 0)] * 2
            for name in served.SERVERS
            if name != absent
        }
        return served.cases_of(runs)[0].gate

    assert gate() == gate(sglang=[5, 9], dense=[5, 8]) == "passed"
    assert gate(graphs=[5, 7]) == gate(dense=[6]) == "failed"
    assert gate(absent="sglang") == gate(absent="dipr") == "failed"
    for config in filter(None, served.SERVERS.values()):
        flags = served.flags_of(config)
        HiSparseConfig.from_dict(json.loads(flags[flags.index("--hisparse-config") + 1]))


def test_the_gate_under_load_compares_first_tokens() -> None:
    from hisparse_bench.server import Generation
    from tests.kernels.gpu import served

    def cases(graphs: list[int]) -> list[Case]:
        answers = {"sglang": [5, 6], "graphs": graphs}
        return served.load_cases_of(
            {
                name: [Generation("", ids, [first, 4.0, 4.5], 9, 0) for first in (1.0, 3.0)]
                for name, ids in answers.items()
            }
        )

    per_token, last = cases([5, 9])
    assert per_token.gate == last.gate == "passed"
    assert [result.median_us for result in last.results] == [3e6, 3e6]
    assert cases([6, 6])[0].gate == cases([])[0].gate == "failed"


def test_wheels_are_named_by_the_pins() -> None:
    pins = Path(ROOT / "requirements" / "cpu.txt").read_text().lower()
    script = (ROOT / "scripts" / "gpu_wheels.sh").read_text()
    names = script.split("packages=(")[1].split(")")[0].split()
    assert all(f"\n{name.lower()}==" in f"\n{pins}" for name in names)
