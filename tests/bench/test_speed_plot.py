"""The plot of speed: the committed picture shows the committed results."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hisparse.errors import ConfigError
from hisparse_bench.speed_plot import draw, main

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def sources() -> list[Path]:
    """The files that ``make docs`` draws: make itself says them, since it expands its variables."""
    recipe = subprocess.run(
        ["make", "--dry-run", "docs"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.replace("\\\n", " ")
    (command,) = re.findall(r"hisparse_bench\.speed_plot (.*) docs/images/speed\.svg", recipe)
    return [ROOT / name for name in command.split()]


@pytest.fixture
def reports(sources: list[Path]) -> list[dict[str, Any]]:
    return [json.loads(source.read_text(encoding="utf-8")) for source in sources]


def test_the_committed_picture_is_what_the_command_draws(
    sources: list[Path], tmp_path: Path
) -> None:
    assert main([*map(str, sources), str(tmp_path / "speed.svg")]) == 0
    drawn = (tmp_path / "speed.svg").read_text(encoding="utf-8")
    assert drawn == (ROOT / "docs/images/speed.svg").read_text(encoding="utf-8"), "make docs"


def test_it_names_every_median_the_machine_and_the_commit(reports: list[dict[str, Any]]) -> None:
    svg = draw(reports)
    ElementTree.fromstring(svg)
    assert svg.count("\n") < 300
    shown = [float(x) for x in re.findall(r">([\d.]+) ms<", svg)]
    medians = [r["median_us"] / 1e3 for x in reports for c in x["cases"] for r in c["results"]]
    for median in medians:
        assert any(value == pytest.approx(median, rel=6e-3) for value in shown), median
    assert reports[0]["machine"] in svg
    assert reports[0]["commit"][:7] in svg
    for context in ("32,768", "4,096"):
        assert f"{context} tokens of context" in svg


def test_it_names_the_algorithm_and_the_kernels(reports: list[dict[str, Any]]) -> None:
    reports[0]["instruction_sets"] = {"kernels": "AVX2", "torch": "AVX2"}
    reports[0]["cases"][0]["params"]["algorithm"] = "topp"
    svg = draw(reports)
    assert svg.count("; AVX2 kernels") == 1
    assert svg.count("hisparse, topp") == 1
    del reports[0]["instruction_sets"]  # as in reports of before 2026-11
    assert "AVX2 kernels" not in draw(reports)


def test_reports_of_two_commits_or_a_failed_gate_are_refused(
    reports: list[dict[str, Any]],
) -> None:
    with pytest.raises(ConfigError, match="expected one machine and commit"):
        draw([*reports, {**reports[0], "commit": "0123456789ab"}])
    reports[0]["cases"][0]["gate"] = "failed"
    with pytest.raises(ConfigError, match="the gate of 'decode' failed"):
        draw(reports)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"command": "eval"}'])
def test_a_file_that_is_no_report_is_refused_in_one_line(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    assert main([str(file), str(tmp_path / "x.svg")]) == 1
    error = capsys.readouterr().err
    assert str(file) in error and error.count("\n") == 1
    assert main([]) == 2
