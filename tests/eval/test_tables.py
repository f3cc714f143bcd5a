"""The printed tables: every figure is the result's."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console

from hisparse.cli.eval import _print_tables
from hisparse.eval import make_cells, make_summary
from hisparse.eval.tables import make_tables
from tests.eval.synthetic_records import record

DIPR = "dipr(alpha=0.9,x=<b>)"


def result(budgets: tuple[int, ...] = (64, 128)) -> dict[str, Any]:
    records = [
        record("a", "dense", kl=[1e-6] * 3, continued=[-3.0, -2.9, -3.2], right=answers(True))
    ]
    for i, budget in enumerate(budgets):
        for method, kl, cost in (("oracle", 0.1, 2000), ("quest", 0.3, 700), (DIPR, 0.2, 800)):
            records.append(
                record(
                    "a",
                    method,
                    kl=[kl / (i + 1), kl, kl * 1.1],
                    continued=[-3.0 - kl, -3.0, -3.4],
                    copied=[[-kl] * 4, [-0.2] * 4],
                    right=answers(method != "quest"),
                    budget=budget,
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


def answers(right: bool) -> dict[str, list[bool]]:
    return {"needle": [True, right], "variable": [False, False]}


def rows(made: dict[str, Any], title: str) -> dict[str, list[str]]:
    """Cells of a table, by the first of each row."""
    (table,) = [x for x in make_tables(made) if x.title == title]
    return {row[0]: row[1:] for row in (table.heads, *table.rows)}


def numbers(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"-?[\d.]+(?:e-?\d+)?", text.replace(",", ""))]


def test_every_number_of_the_tables_is_the_summarys() -> None:
    made = result()
    shown = rows(made, "Compared with dense attention")
    names = ["ppl_ratio", "copy_ppl_ratio", "mass", "kept_mean", "bytes_per_token"]
    assert len(shown) == 1 + len(made["summary"])
    for line in made["summary"]:
        budget = "" if line["method"] == "dense" else f", {line['budget']}"
        divergence, *others = shown[f"{line['method']}{budget} of 1024"]
        assert numbers(divergence.replace("\N{EN DASH}", " ")) == pytest.approx(
            [line["kl"], *line["intervals"]["kl"]], rel=6e-3
        )
        for cell, name in zip(others, names, strict=True):
            expected = [] if line[name] is None else [line[name]]
            assert numbers(cell) == pytest.approx(expected, rel=6e-3), (line["method"], name)


def test_scores_have_intervals_and_what_dense_cannot_do_is_set_apart() -> None:
    made = result()
    shown = rows(made, "Correct answers, percent")
    assert shown["method, budget of context"] == ["copy (n 1-2)", "needle (n 2)", "variable (n 2)"]
    assert shown["quest, 64 of 1024"][1:] == ["50 (0\N{EN DASH}100)", "[0 (0\N{EN DASH}0)]"]
    marked = [cell for row in shown.values() for cell in row if cell.startswith("[")]
    assert len(marked) == 7, "one task of six methods and of dense"


def test_tables_are_printed_in_80_columns() -> None:
    out = io.StringIO()
    _print_tables(Console(file=out, width=80, highlight=False), make_tables(result((64,))))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert out.getvalue().count("[") == 4, "one task of three methods and of dense"
    assert sum(line.lstrip().startswith("oracle") for line in lines) == 2, "in two tables"
