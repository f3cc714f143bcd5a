"""From records to figures: means, intervals of known cases, ratios by pairs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hisparse.eval import make_cells, make_summary
from hisparse.eval.divergence import mean_interval, ratio_interval
from tests.eval.synthetic_records import record


def line_of(records: list[dict[str, Any]], method: str) -> dict[str, Any]:
    (line,) = [line for line in make_summary(records) if line["method"] == method]
    return line


def test_scores_and_their_intervals() -> None:
    def asked(document: str, method: str, right: list[bool], wrong: list[bool]) -> dict[str, Any]:
        return record(
            document, method, kl=[0.5], continued=[-1.0], right={"needle": right, "copy": wrong}
        )

    records = [
        asked("a", "dense", [True] * 10, [False]),
        asked("a", "quest", [True] * 4 + [False] * 6, [True]),
        asked("b", "dense", [True] * 9 + [False], [False]),
        asked("b", "quest", [True] * 8 + [False] * 2, [True]),
    ]
    cells = {(c["method"], c["task"]): c for c in make_cells(records)}
    cell = cells["quest", "needle"]
    assert (cell["score"], cell["dense"], cell["n"], cell["usable"]) == (0.6, 0.95, 20, True)
    assert 0.35 < cell["low"] < 0.45
    assert 0.75 < cell["high"] < 0.85
    assert not cells["quest", "copy"]["usable"], "the dense model does not do it either"
    assert ("quest", "continue") not in cells, "the text that follows has no score"


def test_the_interval_of_a_mean_is_as_wide_as_theory_says() -> None:
    values = np.random.default_rng(1).normal(3.0, 1.0, 400)
    low, high = mean_interval(values)
    error = 1.96 * values.std() / 20
    assert low == pytest.approx(values.mean() - error, abs=0.02)
    assert high == pytest.approx(values.mean() + error, abs=0.02)
    assert mean_interval(values) == (low, high), "the same each time"


def test_documents_are_resampled_where_there_are_enough() -> None:
    # Tokens of a document are alike, documents differ: drawing tokens would see no difference.
    parts = [np.full(50, value) for value in (1.0, 2.0, 3.0, 4.0)]
    ones = [np.ones(50) for _ in parts]
    low, high = ratio_interval(parts, ones)
    assert low < 1.8 < 3.2 < high
    assert ratio_interval(parts[:3], ones[:3]) == (2.0, 2.0)
    records = [record(str(i), m, kl=[0.1], continued=[-1.0]) for i in range(4) for m in METHODS]
    assert line_of(records, "quest")["resampled"] == "documents"
    assert line_of(records[:6], "quest")["resampled"] == "tokens and passages"
    # So are documents whose answers are all right or all wrong.
    records = [
        record(str(i), m, kl=[0.1], continued=[-1.0], right={"facts": [i > 1] * 30})
        for i in range(4)
        for m in METHODS
    ]
    cell, few = (
        next(c for c in make_cells(found) if c["task"] == "facts")
        for found in (records, records[:6])
    )
    assert (cell["low"], cell["high"]) == (0, 1) and cell["n"] == 120
    assert few["low"] == few["high"] == few["score"] == pytest.approx(1 / 3)


METHODS = ("dense", "quest")


def test_dense_attention_has_no_budget_and_no_sparse_algorithm() -> None:
    records = [record("a", name, kl=[0.1], continued=[-1.0]) for name in METHODS]
    for lines in (make_cells(records), make_summary(records)):
        found = {line["method"]: (line["algorithm"], line["budget"]) for line in lines}
        assert found == {"dense": ("dense", None), "quest": ("quest", records[1]["budget"])}


def test_divergence_and_perplexity() -> None:
    records = [
        record("a", "dense", kl=[0.0] * 2, continued=[-1.0, -3.0], copied=[[-0.1] * 3]),
        record("a", "quest", kl=[0.2, 0.4], continued=[-2.0, -4.0], copied=[[-0.1, -0.2, -0.6]]),
    ]
    line = line_of(records, "quest")
    assert line["kl"] == pytest.approx(0.3)
    assert line["ppl"] == pytest.approx(math.exp(3))
    assert line["copy_ppl"] == pytest.approx(math.exp(0.3))
    assert line["ppl_ratio"] == pytest.approx(math.e)
    assert line["copy_ppl_ratio"] == pytest.approx(math.exp(0.2))
    for name, (low, high) in ((n, x) for n, x in line["intervals"].items() if x):
        assert low <= line[name] <= high
    dense = line_of(records, "dense")
    assert (dense["ppl_ratio"], dense["mass"]) == (1, None)


def test_ratios_are_drawn_in_pairs() -> None:
    rng = np.random.default_rng(0)
    log_probs = rng.normal(-3, 2, 64)
    records = [
        record("a", "dense", kl=[0.0] * 64, continued=log_probs.tolist()),
        record("a", "quest", kl=[0.1] * 64, continued=(log_probs - 0.1).tolist()),
    ]
    line = line_of(records, "quest")
    # Each token is worse by as much: the figures are unsure, their ratios are not.
    low, high = line["intervals"]["ppl"]
    assert high / low > 2
    assert line["intervals"]["ppl_ratio"] == pytest.approx([math.exp(0.1)] * 2)


def test_what_is_kept_is_averaged_over_documents() -> None:
    records = [record(x, "dense", kl=[0.0], continued=[-1.0]) for x in "ab"]
    records += [record(x, "dipr", kl=[0.1], continued=[-1.0]) for x in "ab"]
    records[-1]["mass"] = 0.25
    line = line_of(records, "dipr")
    assert line["mass"] == pytest.approx(0.5)
    assert line["documents"] == 2
    assert line_of(records, "dense")["mass"] is None
