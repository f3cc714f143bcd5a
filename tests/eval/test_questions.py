"""The questions over the texts that hisparse ships."""

from __future__ import annotations

import re

import pytest

from hisparse.eval.documents import Question, questions_of
from hisparse.eval.texts import TEXTS, read_text

#: Characters of about 4,096 tokens.
_STRETCH = 17000


def words(text: str) -> list[str]:
    return re.findall(r"[\w'.,/$-]*\w", text.casefold())


@pytest.fixture(params=TEXTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def questions(name: str) -> list[Question]:
    return questions_of(read_text(name), name)


def test_evidence_is_whole_sentences_that_stand_once(name: str, questions: list[Question]) -> None:
    text = read_text(name)
    for question in questions:
        assert text.count(question.sentences[0]) == 1
        before, after = text.split(question.sentences[0])
        assert re.search(r"([.!?;] |\n\n|^)$", before), question.sentences[0]
        assert re.search(r"^( |\n|$)", after), question.sentences[0]
        assert re.search(r"[.!?;][\"')]?$", question.sentences[0]) or after.startswith("\n")


def test_the_evidence_holds_the_answer(questions: list[Question]) -> None:
    for question in questions:
        held = question.sentences[0].casefold()
        assert words(question.completion[1])
        assert all(word in held for word in words(question.completion[1])), question


def test_prompts_are_short_and_do_not_hold_the_answer(questions: list[Question]) -> None:
    assert len({question.completion[0] for question in questions}) == len(questions)
    for question in questions:
        prompt, answer = question.completion
        assert re.fullmatch(r"\n\nQuestion: [^\n]+\?\nAnswer: [A-Z]([^\n]*\S)?", prompt)
        assert len(words(prompt)) <= 18
        assert re.fullmatch(r" \S[^\n]*[\w]", answer)
        assert answer.strip().casefold() not in prompt.casefold()


def test_there_are_enough_wherever_a_context_begins(name: str, questions: list[Question]) -> None:
    text = read_text(name)
    assert len(questions) >= 40
    assert len(questions_of(text[:_STRETCH], name)) >= 15
    for start in range(0, len(text) - _STRETCH, 1000):
        assert len(questions_of(text[start : start + _STRETCH], name)) >= 8


def test_a_part_has_the_questions_that_it_answers_and_other_texts_have_none(name: str) -> None:
    text = read_text(name)
    first = questions_of(text, name)[0]
    assert questions_of(first.sentences[0], name)[0] == first
    assert questions_of(first.sentences[0][1:], name) == []
    assert questions_of(text, "other") == []
    other = next(other for other in TEXTS if other != name)
    assert questions_of(text, other) == []
