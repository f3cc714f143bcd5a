"""What a document holds, and what is asked about it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hisparse.errors import ConfigError
from hisparse.eval import Document, make_document
from hisparse.eval.facts import PLANTED
from hisparse.texts import TEXTS, read_text


class Letters:
    """A tokenizer: a byte is a token."""

    def __call__(self, text: str, **_: object) -> SimpleNamespace:
        return SimpleNamespace(input_ids=list(text.encode()))

    @staticmethod
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def document(text: str = "moby_dick", length: int = 9000, seed: int = 0) -> Document:
    return make_document(Letters(), read_text(text), text, length, seed)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("length", [6000, 9001, 20000])
def test_a_context_is_as_long_as_asked_for_and_holds_every_answer(text: str, length: int) -> None:
    made = document(text, length)
    # The items begin with the context's last token.
    assert len(made.ids) == length - 1
    context = Letters.decode(made.ids)
    tasks = [item.task for item in made.items]
    for task in ("needle", "multikey", "variable"):
        assert tasks.count(task) == PLANTED
    for item in made.items:
        answer = Letters.decode(item.ids[item.first :])
        if item.task in ("needle", "multikey"):
            said = Letters.decode(item.ids).rsplit("Answer: ", 1)[1]
            assert said + "." in context
        if item.task == "variable":
            first, _, assigned = answer.strip().partition(". ")
            assert assigned + "." in context
            assert f"= VAR {first}." in context
            assert context.index(assigned) < context.index(f"= VAR {first}.")
        if item.task == "copy":
            assert Letters.decode(item.ids[1:]) in context


def test_what_follows_continues_the_text() -> None:
    made = document()
    follows = next(item for item in made.items if item.task == "continue")
    whole = read_text("moby_dick")
    said = Letters.decode(follows.ids[1:]).strip()
    assert said in whole
    last = Letters.decode(made.ids)[-30:].strip()
    assert whole.index(last[-20:]) < whole.index(said)


def test_documents_differ_by_seed_and_are_the_same_each_time() -> None:
    assert document(seed=1) == document(seed=1)
    assert document(seed=1).ids != document(seed=2).ids


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"context 90000: .* tokens of the text 'moby_dick'"):
        document(length=90000)
