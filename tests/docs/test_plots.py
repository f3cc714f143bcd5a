"""The committed pictures and the figures of docs/quality.md are those of the committed results."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hisparse.errors import ConfigError
from scripts import ruler_table
from scripts.make_plots import (
    main,
    make_styles,
    misses_figure,
    pool_scores,
    quality_figure,
    speed_figure,
)

ROOT = Path(__file__).parent.parent.parent
KINDS = ("quality", "ruler", "speed", "misses", "trace")
_TASKS = ("needle", "multikey", "qa", "copy")


@pytest.fixture(scope="module")
def sources() -> dict[str, list[Path]]:
    """The files that ``make docs`` draws: make itself says them, since it expands its variables."""
    recipe = subprocess.run(
        ["make", "--dry-run", "docs"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.replace("\\\n", " ")
    found = {}
    for kind in KINDS:
        (words,) = re.findall(rf"scripts\.make_plots {kind} (.*) docs/images/{kind}\.svg", recipe)
        found[kind] = [ROOT / name for name in words.split()]
    return found


@pytest.fixture
def result(sources: dict[str, list[Path]]) -> dict[str, Any]:
    (file,) = sources["quality"]
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.fixture
def reports(sources: dict[str, list[Path]]) -> list[dict[str, Any]]:
    return [json.loads(file.read_text(encoding="utf-8")) for file in sources["speed"]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_committed_picture_is_what_the_command_draws(
    kind: str, sources: dict[str, list[Path]], tmp_path: Path
) -> None:
    """And it is small and stands alone."""
    out = tmp_path / "drawn.svg"
    assert main([kind, *map(str, sources[kind]), str(out)]) == 0
    drawn = out.read_text(encoding="utf-8")
    assert drawn == (ROOT / f"docs/images/{kind}.svg").read_text(encoding="utf-8"), "make docs"
    ElementTree.fromstring(drawn)
    assert len(drawn) < 60_000
    assert not re.search(r'href="[^#]|@import|<script', drawn)
    assert "#ffffff" in drawn, "a background of its own"


def _page_rows(first_head: str, name: str = "bench/results/README.md") -> list[list[str]]:
    """The cells of the table of a page whose first head this is."""
    page = (ROOT / name).read_text(encoding="utf-8")
    table = page.partition(f"\n| {first_head} |")[2].partition("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def test_every_figure_of_the_quality_page_is_the_results(result: dict[str, Any]) -> None:
    for x in (*result["cells"], *result["summary"]):
        # The results are older than the option's end: every index is flat.
        x["method"] = x["method"].replace(",index=flat", "")
    cells = {(x["method"], x["budget"], x["task"]): x for x in result["cells"]}
    lines = {(x["method"], x["budget"]): x for x in result["summary"]}
    dense = next(key for key in lines if key[0] == "dense")
    rows = _page_rows("method")
    for name, budget, *shown in rows:
        method = name.strip("`")
        key = dense if method == "dense" else (method, int(budget))
        line = lines[key]
        tasks = {x: cells[(*key, x)] for x in _TASKS}
        right = {x: round(cell["score"] * cell["n"]) for x, cell in tasks.items()}
        expected = [str(right["needle"] + right["multikey"]), str(right["qa"]), str(right["copy"])]
        kept = "-" if method == "dense" else f"{line['kept_mean']:.0f}"
        assert shown == [*expected, f"{line['kl']:.3f}", kept, f"{line['bytes_per_token']:,.0f}"]
    assert len(rows) == 16


def test_every_figure_of_the_other_models_is_their_results() -> None:
    heads = ("dense", "oracle", "sketch", "quest", "streaming")
    rows = _page_rows("model, tokens of context")
    for _, measure, *shown, name in rows:
        (file,) = (ROOT / "bench/results").glob(f"2026-{name.strip('`')}.json")
        found = json.loads(file.read_text(encoding="utf-8"))
        lines, field, form = found["summary"], "kl", ".3f"
        if measure != "KL":
            lines, field, form = pool_scores(found["cells"]), "score", ".0f"
            assert measure == f"right, % of {lines[0]['n']}"
        values = {x["method"]: x[field] for x in lines if x["budget"] == 256} | {
            "dense": next(x[field] for x in lines if x["method"] == "dense")
        }
        assert shown == [format(values[x], form) if x in values else "-" for x in heads]
    assert len(rows) == 7


def test_rulers_tables_are_the_results(sources: dict[str, list[Path]]) -> None:
    """More prompts with one budget, and those of the plot, which has more budgets."""
    (plotted,) = sources["ruler"]
    more = plotted.with_name("2026-11-28-ruler-qwen-4k-be2554d.json")
    result, few = (json.loads(x.read_text(encoding="utf-8")) for x in (more, plotted))
    page, results = (
        (ROOT / name).read_text(encoding="utf-8")
        for name in ("docs/quality.md", "bench/results/README.md")
    )
    assert f"\n{ruler_table.means(result)}\n" in page, "python -m scripts.ruler_table"
    assert f"\n{ruler_table.means(few, 128)}\n" in page, "python -m scripts.ruler_table"
    for file, found, text in ((more, result, " prompts of the ten"), (plotted, few, " of these")):
        assert f"\n{ruler_table.tasks(found)}\n" in results
        assert f"`{file.stem}`" in results
        (mean,) = (c for c in found["cells"] if (c["method"], c["task"]) == ("dense", "mean"))
        assert f"{mean['n']}{text}" in page


def test_the_rivals_table_is_the_results() -> None:
    file = ROOT / "bench/results/2026-11-28-ruler-rivals-qwen-4k-77f2bb3.json"
    result = json.loads(file.read_text(encoding="utf-8"))
    page, results = (
        (ROOT / name).read_text(encoding="utf-8")
        for name in ("docs/quality.md", "bench/results/README.md")
    )
    assert f"\n{ruler_table.losses(result)}\n" in page, "python -m scripts.ruler_table"
    assert f"\n{ruler_table.tasks(result)}\n" in results
    assert f"`{file.stem}`" in results


def test_losses_of_a_method_are_in_one_row() -> None:
    cell = {"task": "mean", "bytes_per_token": 3.0, "lost_low": -0.5, "lost_high": 0.5}
    found = [("dense", None, 0.0), ("a", 96, 0.2), ("b", 96, 0.1), ("b", 48, 0.3)]
    cells = [cell | dict(zip(("method", "budget", "lost"), x, strict=True)) for x in found]
    cells[1]["bytes_per_token"] = 0
    rows = ruler_table.losses({"cells": cells}).splitlines()
    assert rows[0] == "| method | bytes | lost, 96 | lost, 48 |"
    assert rows[2:] == [
        "| `b` | 3 | 10.0 (-50.0 to 50.0) | 30.0 (-50.0 to 50.0) |",
        "| `a` | by request | 20.0 (-50.0 to 50.0) | - |",
    ]


def test_methods_are_compared_in_pairs() -> None:
    cell = {"kept_mean": 90.0, "bytes_per_token": 2.0, "budget": 96, "task": "mean"}
    cell |= dict.fromkeys(("low", "high", "lost_low", "lost_high"), 0.5)
    found = {"sketch": [1.0, 0.5, 1.0], "quest": [0.5, 0.0, 0.5]}
    cells = [
        cell | {"method": name, "scores": x, "score": x[0], "lost": 1 - x[0]}
        for name, x in found.items()
    ]
    rows = ruler_table.means({"cells": cells}).splitlines()
    assert rows[2].endswith("| 0.0 (50.0 to 50.0) | - |")
    assert rows[3].endswith("| 50.0 (50.0 to 50.0) | 50.0 (50.0 to 50.0) |")


def test_every_figure_of_several_answers_is_the_results() -> None:
    file = ROOT / "bench/results/2026-11-27-eval-long-qwen-4k-66e63ae.json"
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    rows = _page_rows("method, several answers", "bench/results/README.md")
    for name, *shown in rows:
        group = [cell for cell in cells if f"`{cell['method']}`" == name]
        assert [(cell["task"], cell["n"]) for cell in group] == [("facts", 30), ("turns", 28)]
        forms = ["{right:.0f} ({low:.0f}% to {high:.0f}%)".format(**_right(x)) for x in group]
        pairs = zip(forms, group, strict=True)
        assert shown == [form if cell["usable"] else f"[{form}]" for form, cell in pairs]
    assert 2 * len(rows) == len(cells)


def _right(cell: dict[str, Any]) -> dict[str, float]:
    right = cell["score"] * cell["n"]
    return {"right": right, "low": 100 * cell["low"], "high": 100 * cell["high"]}


def test_every_figure_beside_locks_is_the_results() -> None:
    rows = _page_rows("model: bytes of `sketch`, LOCKS", "docs/sketch.md")
    for about, *shown in rows:
        model, ours, theirs = re.fullmatch(r"(\w+).*: (\d+), (\d+)", about).groups()
        name = f"2026-11-27-mass-{'qwen' if model == 'Qwen2' else 'smollm2'}-4k-*.json"
        (file,) = (ROOT / "bench/results").glob(name)
        lines = json.loads(file.read_text(encoding="utf-8"))["rows"]
        kept = {(x["method"], x["bytes"], x["budget"]): 100 * x["mass"] for x in lines}
        pair = (("sketch", int(ours)), ("locks, its vote", int(theirs)))
        for cell, budget in zip(shown, (96, 128, 256, 512), strict=True):
            assert cell == ", ".join(f"{kept[*method, budget]:.1f}" for method in pair)
    assert len(rows) == 4


def test_styles_are_different() -> None:
    styles = make_styles(map(str, range(50)))
    assert len({(style["color"], style["marker"]) for style in styles.values()}) == 50


def test_scores_are_the_results_figures(result: dict[str, Any]) -> None:
    scores = pool_scores(result["cells"])
    # 18 of 30 copied, 23 and 24 of 30 planted, 16 of 33 about the text; variables do not count.
    quest = next(x for x in scores if (x["method"], x["budget"]) == ("quest", 256))
    assert quest["score"] == pytest.approx(100 * (18 + 23 + 24 + 16) / 123)
    assert quest["n"] == 123
    low, high = quest["intervals"]["score"]
    assert 55 < low < quest["score"] < high < 75
    for line in scores:
        low, high = line["intervals"]["score"]
        assert 0 <= low <= line["score"] <= high <= 100


def test_quality_shows_the_results_figures(result: dict[str, Any]) -> None:
    left, right = quality_figure(result).axes
    own = [x for x in result["summary"] if x["method"] == "sketch"]
    points = sorted((x["kept_mean"], x["kl"]) for x in own)
    (drawn,) = [x for x in right.lines if x.get_label() == "sketch"]
    assert list(drawn.get_ydata()) == [kl for _, kl in points]
    # Lines are apart by up to 5%, so that equal values do not hide each other.
    assert list(drawn.get_xdata()) == pytest.approx([kept for kept, _ in points], rel=0.05)
    assert "percent of 123" in left.get_title()


def test_a_result_of_several_contexts_is_refused(result: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected a result with one context"):
        quality_figure(result | {"context": [4096, 8192]})


def test_speed_names_every_median_the_machine_and_the_commit(
    reports: list[dict[str, Any]],
) -> None:
    figure = speed_figure(reports)
    words = [text.get_text() for ax in figure.axes for text in ax.texts]
    shown = [float(word.removesuffix(" ms")) for word in words]
    medians = [r["median_us"] / 1e3 for x in reports for c in x["cases"] for r in c["results"]]
    assert len(shown) == len(medians)
    for median in medians:
        assert any(value == pytest.approx(median, rel=6e-3) for value in shown), median
    assert f"{reports[0]['machine']}, commit {reports[0]['commit'][:7]}" in figure.get_suptitle()
    titles = [ax.get_title() for ax in figure.axes]
    assert [title.split(" tokens of context")[0] for title in titles] == 2 * ["32,768"] + 2 * [
        "4,096"
    ]


def test_speed_names_the_algorithm_and_the_kernels(reports: list[dict[str, Any]]) -> None:
    reports[0]["instruction_sets"] = {"kernels": "AVX2", "torch": "AVX2"}
    reports[0]["cases"][0]["params"]["algorithm"] = "dipr"
    figure = speed_figure(reports)
    assert ["; AVX2 kernels" in ax.get_title() for ax in figure.axes] == [True, *3 * [False]]
    names = {text.get_text() for ax in figure.axes for text in ax.get_yticklabels()}
    assert "hisparse, dipr" in names and len(names) == 4
    del reports[0]["instruction_sets"]  # as in reports of before 2026-11
    assert "AVX2" not in speed_figure(reports).axes[0].get_title()


def test_missing_pages_are_the_results(sources: dict[str, list[Path]]) -> None:
    """The table; and in the plot no copy has a time here, and a transfer waits for its bytes."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in sources["misses"]]
    rows, rates, longer, step = [], [], [], dict[str, list[float]]()
    for report in found:
        (case,) = report["cases"]
        params, us = case["params"], {x["impl"]: x["median_us"] for x in case["results"]}
        away, attend = params["away"], params["away"]["attend_us"]
        ways = [f"{us[name]:,.0f}" for name in ("cpu", "cpu_auto", "cpu_host")]
        rates.append(away["bytes"] / attend / 1e3)
        rows.append([f"{params['miss_ratio']:.0%}", *ways, f"{attend:.0f}, {rates[-1]:.1f} GB/s"])
        longer.append(us["cpu_auto"] / min(us["cpu"], us["cpu_host"]) - 1)
        step.setdefault("host", []).append(us["cpu_host"] - away["load_us"])
        for rate in (25, 50):
            link = us["cpu"] - away["load_us"] + away["bytes"] / (1e3 * rate)
            step.setdefault(f"transfer, {rate} GB/s", []).append(link)
    assert _page_rows("missing") == rows
    page = " ".join((ROOT / "docs/misses.md").read_text(encoding="utf-8").split())
    assert f"at most {max(longer):.1%} longer" in page
    assert f"at {min(rates):.1f} to {max(rates):.1f} GB/s: over links of 25 and 50 GB/s" in page
    left, right = misses_figure(found).axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in left.lines}
    assert {name: drawn[name] for name in step} == {x: pytest.approx(y) for x, y in step.items()}
    (waits,) = [line.get_ydata() for line in right.lines if line.get_label() == "host"]
    assert list(waits) == [x["cases"][0]["params"]["away"]["attend_us"] for x in found]


def test_reports_of_two_commits_or_a_failed_gate_are_refused(
    reports: list[dict[str, Any]],
) -> None:
    with pytest.raises(ConfigError, match="expected one machine and commit"):
        speed_figure([*reports, {**reports[0], "commit": "0123456789ab"}])
    reports[0]["cases"][0]["gate"] = "failed"
    with pytest.raises(ConfigError, match="the gate of 'decode' failed"):
        speed_figure(reports)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("content", [None, "{", "[]", '{"command": "other"}'])
def test_a_file_that_is_no_result_is_refused_in_one_line(
    content: str | None, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    assert main([kind, str(file), str(tmp_path / "x.svg")]) == 1
    error = capsys.readouterr().err
    assert str(file) in error and error.count("\n") == 1
    assert not (tmp_path / "x.svg").exists()


@pytest.mark.parametrize("words", [[], ["quality", "a.json"], ["other", "a.json", "b.svg"]])
def test_the_usage_is_said(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(
        "usage: quality|ruler|speed|misses|trace|capacity RESULT.json"
    )
