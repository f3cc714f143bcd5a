"""What benchmarks print: the fields that other programs read, and nothing beside a failed check."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from hisparse_bench.report import Case, Report, Result


def _case(gate: str) -> Case:
    slow = Result.of("slow", [3.0, 1.0, 2.0])
    return Case(name="both", params={"n": 1}, gate=gate, results=[slow, Result.of("fast", [0.5])])


def _table(report: Report) -> str:
    out = io.StringIO()
    report.print_table(Console(file=out, width=200))
    return out.getvalue()


def test_of_takes_seconds_and_gives_microseconds() -> None:
    result = Result.of("x", [3.0, 1.0, 2.0])
    assert result == Result(impl="x", median_us=2e6, p10_us=1.2e6, p90_us=2.8e6)


def test_ratios_are_the_first_over_the_second_if_the_check_passed() -> None:
    assert _case("passed").ratios == {"slow/fast": 4.0}
    assert _case("failed").ratios == _case("not checked").ratios == {}


@pytest.mark.parametrize(
    ("seconds", "moved", "median_us", "gb_s"),
    [
        (1.23456789e-6, 1000, 1.235, 0.81),
        (123456.789e-6, 123457, 123457.0, 0.001),
        (2.0, 1024, 2e6, 5.12e-7),
    ],
    ids=["fast", "slow", "very slow"],
)
def test_figures_keep_four_digits_however_slow_the_machine_is(
    seconds: float, moved: int, median_us: float, gb_s: float
) -> None:
    result = Result.of("x", [seconds], moved)
    assert (result.median_us, result.gb_s) == (median_us, gb_s)


def test_small_ratios_keep_four_digits() -> None:
    results = [Result.of("fast", [1e-5]), Result.of("slow", [2.6e-4])]
    assert Case(name="x", params={}, gate="passed", results=results).ratios == {
        "fast/slow": 0.03846
    }


def test_fields() -> None:
    report = json.loads(Report(command="bench x", device="cpu", cases=[_case("passed")]).to_json())
    origin = {"date", "machine", "instruction_sets", "versions", "commit"}
    assert set(report) == {"command", "device", "cases"} | origin
    assert report["versions"]["python"].startswith("3.")
    assert report["machine"]
    assert report["commit"]
    (case,) = report["cases"]
    assert set(case) == {"name", "params", "gate", "results", "ratios"}
    assert [r["impl"] for r in case["results"]] == ["slow", "fast"]
    assert set(case["results"][0]) == {"impl", "median_us", "p10_us", "p90_us", "gb_s"}
    assert case["ratios"] == {"slow/fast": 4.0}


def test_a_failed_check_hides_the_times() -> None:
    report = Report(command="bench x", device="cpu", cases=[_case("failed")])
    (case,) = json.loads(report.to_json())["cases"]
    assert (case["gate"], case["results"], case["ratios"]) == ("failed", [], {})
    assert "2.000" not in _table(report)
    assert "slow" not in _table(report)


@pytest.mark.parametrize(
    ("device", "found", "shown"),
    [
        ("cpu", {"kernels": "AVX2", "torch": "AVX2"}, "bench x: AVX2 kernels, on a Xeon"),
        ("cpu", {"kernels": "AVX2", "torch": "AVX-512"}, "AVX2 kernels, PyTorch with AVX-512, on"),
        ("cpu", {"kernels": "none", "torch": "AVX2"}, "no C++ kernels, PyTorch with AVX2, on"),
        ("cuda", {"kernels": "AVX2", "torch": "AVX2"}, "bench x: CUDA kernels, on a Xeon"),
    ],
)
def test_the_header_names_the_kernels(device: str, found: dict[str, str], shown: str) -> None:
    origin = {"machine": "a Xeon", "instruction_sets": found}
    assert shown in _table(Report(command="bench x", device=device, cases=[], **origin))


@pytest.mark.parametrize("shown", ["2.000 s", "slow/fast 4.0", "passed"])
def test_table(shown: str) -> None:
    assert shown in _table(Report(command="bench x", device="cpu", cases=[_case("passed")]))


def test_the_table_fits_80_columns_and_cuts_nothing_off() -> None:
    results = [
        Result.of("torch_native", [16.096]),
        Result.of("hisparse_dense", [1.02]),
        Result.of("hisparse", [5e-6], 10**6),
    ]
    cases = [Case(name="time_per_token", params={"n": 1}, gate="passed", results=results)]
    out = io.StringIO()
    Report(command="bench x", device="cpu", cases=cases).print_table(Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in out.getvalue()
    assert "16.096 s" in out.getvalue()
    (dense,) = (line for line in lines if "hisparse_dense  " in line)
    assert dense.split()[:5] == ["time_per_token", "passed", "hisparse_dense", "1.020", "s"]
