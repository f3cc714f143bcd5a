"""The report: every figure is the result's, and files that cannot be are refused at once."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hisparse.eval import make_cells, make_summary
from hisparse.eval.report import make_tables, pareto_lines, to_markdown, write_reports
from tests.command import Command
from tests.eval.synthetic_records import record

TOPP = "topp(mass=0.9,x=<b>)"


def result(budgets: tuple[int, ...] = (64, 128)) -> dict[str, Any]:
    records = [
        record("a", "dense", kl=[1e-6] * 3, continued=[-3.0, -2.9, -3.2], right=answers(True))
    ]
    for i, budget in enumerate(budgets):
        for method, kl, cost in (("oracle", 0.1, 2000), ("quest", 0.3, 700), (TOPP, 0.2, 800)):
            kept = [[9.0, 99.0 - 9 * i], None] if method == TOPP else None
            records.append(
                record(
                    "a",
                    method,
                    kl=[kl / (i + 1), kl, kl * 1.1],
                    continued=[-3.0 - kl, -3.0, -3.4],
                    copied=[[-kl] * 4, [-0.2] * 4],
                    right=answers(method != "quest"),
                    budget=budget,
                    kept=kept,
                    cost=cost,
                )
            )
    return {
        "command": "eval",
        "line": "hisparse eval --config '{\"a\": 1}'",
        "date": "2026-01-02T03:04:05+00:00",
        "machine": "mine, 2 cores",
        "versions": {"torch": "2.13.0"},
        "commit": "abc123",
        "model": "tiny",
        "model_source": "a <model> of our own",
        "context": [1024],
        "cells": make_cells(records),
        "summary": make_summary(records),
    }


def changed(**fields: Any) -> dict[str, Any]:
    """A result with other fields in its first line of figures of a sparse method."""
    made = result()
    lines = sorted(made["summary"], key=lambda line: line["method"] == "dense")
    return {**made, "summary": [lines[0] | fields, *lines[1:]]}


def answers(right: bool) -> dict[str, list[bool]]:
    return {"needle": [True, right], "variable": [False, False]}


def rows(page: str, title: str) -> dict[str, list[str]]:
    """Cells of a table, by the first of each row."""
    table = page.split(f"### {title}\n")[1].strip().split("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return {row[0]: row[1:] for row in cells}


def numbers(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"-?[\d.]+(?:e-?\d+)?", text.replace(",", ""))]


def test_every_number_of_the_tables_is_the_summarys() -> None:
    made = result()
    page = to_markdown([made], made["line"])
    costs, kept = rows(page, "Divergence and perplexity"), rows(page, "What is kept")
    hits = rows(page, "Hit ratio by buffer size")
    names = ["kl", "kl_ratio", "ppl", "ppl_ratio", "copy_ppl", "copy_ppl_ratio"]
    assert len(costs) == 2 + len(made["summary"])
    for line in made["summary"]:
        budget = "" if line["method"] == "dense" else f", {line['budget']}"
        name = f"{line['method']}{budget} of 1024"
        for shown, field in zip(costs[name], names, strict=True):
            value = line[field]
            expected = [] if value is None else [value, *line["intervals"][field]]
            assert numbers(shown) == pytest.approx(expected, rel=6e-3), (name, field)
        fields = ["mass", "oracle_recall", "kept_mean", "kept_p95", "capped", "adjacent_overlap"]
        if line["method"] == "dense":
            assert kept[name] == ["-"] * 8 + ["10"]
            continue
        shown = [float(x.replace(",", "")) for x in kept[name][1:7]]
        assert shown == pytest.approx([line[field] for field in fields], rel=6e-3)
        most = 99 if line["budget"] == 64 else 90
        assert kept[name][7] == (f"9 to {most}" if line["method"] == TOPP else "even")
        assert numbers(kept[name][8]) == [line["bytes_per_token"]]
        assert [float(x) for x in hits[name]] == pytest.approx([0.6, 0.8])


def test_scores_have_intervals_and_what_dense_cannot_do_is_set_apart() -> None:
    made = result()
    shown = rows(to_markdown([made], ""), "Correct answers, percent")
    assert shown["method, budget of context"] == ["copy (n 1-2)", "needle (n 2)", "variable (n 2)"]
    assert shown["quest, 64 of 1024"][1:] == ["50 (0 to 100)", "[0 (0 to 0)]"]
    grey = [c for t in make_tables(made) for row in t.rows for c in row if c.startswith("[")]
    assert len(grey) == 7, "one task of six methods and of dense"


def test_pareto_lines_name_methods_that_no_other_beats() -> None:
    (first, _) = pareto_lines(result()["summary"])
    assert "Budget 64 of 1024" in first
    assert "quest (" in first
    assert TOPP in first, "it has less divergence"
    assert "oracle (" not in first
    worse = [line | {"kl": 9.0} for line in result()["summary"] if line["method"] == "quest"]
    found = pareto_lines([*result((64,))["summary"], {**worse[0], "method": "bad"}])
    assert "bad" not in found[0]
    assert pareto_lines(result()["summary"][:2]) == [], "nothing to compare"


def test_where_it_comes_from_is_told() -> None:
    page = to_markdown([result(), {**result(), "model": "second"}], "hisparse eval --from x.json")
    assert "Made by `hisparse eval --from x.json`" in page
    for text in ("## tiny (a <model> of our own)", "## second", "abc123", "mine, 2 cores"):
        assert text in page
    assert "`hisparse eval --config '{\"a\": 1}'`" in page


class Checker(HTMLParser):
    """Tags that are not closed in their order, ids, and what is loaded from elsewhere."""

    VOID = frozenset({"meta", "br", "link", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: Counter[str] = Counter()
        self.refers: set[str] = set()
        self.tags: Counter[str] = Counter()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.handle_startendtag(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            if name == "id":
                self.ids[str(value)] += 1
            if name in ("src", "href", "xlink:href") and not str(value).startswith("data:"):
                self.refers.add(str(value))
            self.refers |= {f"#{x}" for x in re.findall(r"url\(#(.*?)\)", str(value))}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def checked(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    assert not checker.open
    return checker


def html(results: list[dict[str, Any]], folder: Path) -> str:
    write_reports([folder / "page.html"], results, "hisparse eval")
    return (folder / "page.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of two models, the second without the oracle."""
    second = result((64,))
    second["summary"] = [x for x in second["summary"] if x["method"] != "oracle"]
    return html([result(), second], tmp_path_factory.mktemp("page"))


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(page: str) -> None:
    found = checked(page)
    assert set(found.ids.values()) == {1}, "ids of several plots do not meet"
    assert {x.removeprefix("#") for x in found.refers} <= set(found.ids)
    assert not {"script", "link", "img", "iframe"} & set(found.tags)
    assert "@import" not in page
    assert "color-scheme: light dark" in page and "currentColor" in page
    assert "a <model> of our own" in found.text and TOPP in found.text
    assert page.count('<td class="grey">') == 7 + 4
    assert len(page) < 500_000


@pytest.mark.parametrize(
    ("budgets", "expected"),
    [((64, 128), {"Quality against"}), ((64,), set())],
)
def test_plots_are_drawn_where_there_are_data(
    budgets: tuple[int, ...], expected: set[str], page: str
) -> None:
    always = {"Divergence by"}
    section = page.split("<section>")[1 if len(budgets) > 1 else 2]
    titles = re.findall(r'aria-label="(.*?)"', section)
    for title in always | expected:
        assert any(x.startswith(title) for x in titles), title
    assert len(titles) == len(always | expected) == section.count("<svg ")


def test_nothing_is_drawn_of_dense_attention_alone(tmp_path: Path) -> None:
    dense = [line for line in result()["summary"] if line["method"] == "dense"]
    assert "<svg" not in html([{**result(), "summary": dense}], tmp_path)


def test_a_method_has_one_colour_in_all_plots_of_all_models(page: str) -> None:
    _, first, second = page.split("<section>")
    for color, there in (("#0072b2", False), ("#e69f00", True), ("#009e73", True)):
        assert color in first
        assert (color in second) == there, "the oracle is the first of both models together"


def test_saved_results_make_the_same_report_without_a_model(
    tmp_path: Path, command: Command
) -> None:
    files = []
    for name in ("one", "two"):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({**result((64,)), "model": name}))
    page, html_page = tmp_path / "page.md", tmp_path / "page.html"
    sources = [word for file in files for word in ("--from", str(file))]
    assert command("eval", *sources, "--report", str(page), "--report", str(html_page)) == ""
    text = page.read_text(encoding="utf-8")
    assert text.index("## one") < text.index("## two")
    assert rows(text, "What is kept") == rows(to_markdown([result((64,))], ""), "What is kept")
    assert "<h2>two (a &lt;model&gt;" in html_page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("# a page", "not JSON at line 1 column 1"),
        ("[" * 100_000, "nested too deep"),
        ('{"command": "bench"}', "got no cells, commit, context"),
        (json.dumps({**result(), "command": "bench"}), "command: got 'bench' (str), expected"),
        (json.dumps({**result(), "summary": [{"kl": 1}]}), "summary[0]: got no adjacent_overlap"),
        (json.dumps({**result(), "cells": [7]}), "cells[0]: got 7, expected an object"),
        (json.dumps(changed(kl="0.1")), "summary[0]: kl: got '0.1' (str), expected float"),
        (json.dumps(changed(intervals={})), "got None as interval of kl, expected low and high"),
        (json.dumps(changed(hit_ratio={"9x": 0.5})), "the figures of a result contradict"),
    ],
    ids=lambda value: value[:20],
)
def test_a_file_that_is_no_result_is_refused(
    content: str, message: str, tmp_path: Path, command: Command
) -> None:
    file = tmp_path / "result.json"
    file.write_text(content)
    assert message in command.refused(
        "eval", "--from", str(file), "--report", str(tmp_path / "x.html")
    )
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report", "x.pdf"], "got 'x.pdf', expected a name that ends in .md or .html"),
        (
            ["--report", "no/such/x.md"],
            "got 'no/such/x.md', expected a file in a folder that exists",
        ),
        (["--from", "x.json"], "--from: got no --report, expected --report FILE.md"),
        (["--from", "x.json", "--report", "x.md", "--json"], "--from: got --json"),
        (["--from", "absent.json", "--report", "x.md"], "cannot read 'absent.json': No such"),
    ],
)
def test_reports_that_cannot_be_are_refused_before_anything_runs(
    arguments: list[str], message: str, command: Command
) -> None:
    assert message in command.refused("eval", "--model", "no such model", *arguments)


def test_html_without_matplotlib_is_refused_and_markdown_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name)
    )
    saved = tmp_path / "r.json"
    saved.write_text(json.dumps(result()))
    source = ["eval", "--from", str(saved), "--report"]
    refused = command.refused(*source, str(tmp_path / "x.html"))
    assert "needs matplotlib: pip install 'hisparse[eval]'" in refused
    command(*source, str(tmp_path / "x.md"))
