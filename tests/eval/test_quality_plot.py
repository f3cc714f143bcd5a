"""The committed page and plot of quality are made from the committed results."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hisparse.errors import ConfigError
from hisparse.eval.quality_plot import accuracies, divergences, draw, main
from hisparse.eval.report import read_result, to_markdown

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "bench/results/2026-11-21-eval-qwen-4k-2e9299e.json"


@pytest.fixture
def result() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(SOURCE.read_text(encoding="utf-8"))
    return loaded


def test_the_committed_picture_is_what_the_command_draws(tmp_path: Path) -> None:
    assert main([str(SOURCE), str(tmp_path / "quality.svg")]) == 0
    drawn = (tmp_path / "quality.svg").read_text(encoding="utf-8")
    assert drawn == (ROOT / "docs/images/quality.svg").read_text(encoding="utf-8"), "make docs"


def test_the_committed_page_is_what_the_report_writes() -> None:
    page = (ROOT / "docs/quality.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^Made by `(.*)`\.$", page, flags=re.M)
    files = [ROOT / word for word in line.split() if word.endswith(".json")]
    assert page == to_markdown([read_result(file) for file in files], line), "make docs"


def test_make_docs_draws_this_result() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "eval-qwen-4k-2e9299e.json docs/images/quality.svg" in makefile


def test_the_picture_is_small_and_stands_alone(result: dict[str, Any]) -> None:
    svg = draw(result)
    ElementTree.fromstring(svg)
    assert svg.count("\n") < 300
    assert not re.search(r"href|@import|<script", svg)


def test_points_are_the_results_figures(result: dict[str, Any]) -> None:
    line = next(x for x in result["summary"] if (x["method"], x["budget"]) == ("quest", 256))
    point = next(p for p in divergences(result)["quest"] if p.attended == line["kept_mean"])
    assert (point.value, point.low, point.high) == (line["kl"], *line["intervals"]["kl"])
    scores = accuracies(result)
    # 18 of 30 copied, 23 and 24 of 30 planted, 16 of 33 about the text; variables do not count.
    quest = sorted(scores["quest"])[1]
    assert quest.value == pytest.approx(100 * (18 + 23 + 24 + 16) / 123)
    assert 55 < quest.low < quest.value < quest.high < 75
    assert all(0 <= p.low <= p.value <= p.high <= 100 for own in scores.values() for p in own)


def test_other_figures_make_another_picture(result: dict[str, Any]) -> None:
    other = copy.deepcopy(result)
    next(x for x in other["summary"] if x["method"] == "sketch")["kl"] *= 2
    assert draw(other) != draw(result)


def test_a_file_that_is_no_result_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "none.json"), str(tmp_path / "x.svg")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert main([]) == 2


def test_a_result_of_several_contexts_is_refused(result: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected a result with one context"):
        draw(result | {"context": [4096, 8192]})
