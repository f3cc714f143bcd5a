"""The demo's document: the sentence is planted once, at its depth, with no other hint."""

from __future__ import annotations

import pytest

from hisparse.demo.document import HARBOUR, make_prompt, text


@pytest.mark.parametrize("depth", [0.0, 0.3, 0.6, 1.0])
def test_the_fact_is_planted_once_at_its_depth(depth: float) -> None:
    prompt = make_prompt(HARBOUR, depth)
    document, _, question = prompt.rpartition("\n\n")
    assert question == f"Question: {HARBOUR.question}"
    assert document.count(HARBOUR.sentence) == 1
    assert document.find(HARBOUR.sentence) / len(document) == pytest.approx(depth, abs=0.1)
    assert (
        document.replace(HARBOUR.sentence + "\n\n", "").removesuffix(f"\n\n{HARBOUR.sentence}")
        == text().rstrip()
    )


def test_the_answer_is_in_the_fact_alone() -> None:
    assert HARBOUR.is_found_in(HARBOUR.sentence)
    assert not HARBOUR.is_found_in(text())
    assert not HARBOUR.is_found_in(HARBOUR.question)
    assert HARBOUR.is_found_in("It is Blue Herring.")


def test_it_is_a_long_real_text() -> None:
    assert text().startswith("CHAPTER 1") or "Call me Ishmael" in text()[:500]
    assert 5000 < len(text().split()) < 7000
