"""The table of model families: its lines, and what a run is compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import model_table
from scripts.model_families import FAMILIES
from scripts.model_page import make_page, outcome

ROOT = Path(__file__).parents[2]
SERVED = {"torch_native": "served", "hisparse": "served", "flags": "", "name": "Llama"}
SERVED |= {"architecture": "LlamaForCausalLM"}
EQUAL: dict[str, Any] = SERVED | {"equal": 3, "finite": True}


def test_forty_families_have_names_of_their_own() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES) >= 40


def test_the_page_shows_the_newest_result() -> None:
    newest = max((ROOT / "bench" / "results").glob("*-models-*.json"))
    result = json.loads(newest.read_text())
    assert [row["name"] for row in result["families"]] == [family.name for family in FAMILIES]
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert page == make_page(result)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (EQUAL, "served, 3 of 3 equal, sparse finite"),
        (EQUAL | {"finite": False}, "served, 3 of 3 equal, sparse not finite"),
        (SERVED | {"finite": True}, "served, no dense answers, sparse finite"),
        (SERVED | {"hisparse": "hisparse: error: a layer"}, "refused: a layer"),
        (SERVED | {"hisparse": "KeyError: x"}, "fails: KeyError: x"),
        ({"torch_native": "KeyError: x", "hisparse": "KeyError: x"}, "SGLang's error"),
    ],
)
def test_the_outcome_of_a_family(row: dict[str, Any], expected: str) -> None:
    assert outcome(row) == expected


@pytest.mark.parametrize(
    ("row", "known", "code"),
    [
        (EQUAL, EQUAL, 0),
        (EQUAL | {"equal": 2}, None, 1),
        (EQUAL | {"finite": False}, None, 1),
        (SERVED | {"hisparse": "hisparse: error: a layer"}, None, 0),
        (SERVED | {"hisparse": "hisparse: error: a layer"}, EQUAL, 1),
    ],
)
def test_what_a_run_is_held_against(
    row: dict[str, Any], known: dict[str, Any] | None, code: int
) -> None:
    assert model_table._judge([row], {"Llama": known} if known else {}) == code


def test_the_line_that_ended_a_server() -> None:
    log = "[2026-11-22 10:00:00] Scheduler hit\nTraceback\n  File x\n"
    assert model_table._reason(log) == ""
    log += "ValueError: no such backend at 0x7f01\nRuntimeError: later\n"
    assert model_table._reason(log) == "ValueError: no such backend at 0x…"
    log += "[2026] ERROR hisparse: error: a layer has chunks\n"
    assert model_table._reason(log) == "hisparse: error: a layer has chunks"


def test_a_probability_that_is_no_number_is_seen() -> None:
    def answers(value: float | None) -> list[dict[str, Any]]:
        meta = {"output_token_logprobs": [[value, 3, None]], "cached_tokens": 64}
        return [{"output_ids": [3], "meta_info": meta}] * 3

    facts = model_table._compare({"short": answers(-1.0), "long": answers(-2.0)}, answers(-1.5))
    assert facts["finite"] and facts["equal"] == 3 and facts["logprob_difference"] == 0.5
    for found in ({"short": answers(None)}, {"long": answers(None)}):
        served = {"short": answers(-1.0), "long": answers(-1.0)} | found
        assert not model_table._compare(served, answers(-1.0))["finite"]
