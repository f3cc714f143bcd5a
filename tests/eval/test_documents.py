"""What a document holds, and what is asked about it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hisparse.errors import ConfigError
from hisparse.eval import Document, Item, make_document
from hisparse.eval.documents import count_questions, questions_of
from hisparse.eval.texts import TEXTS, read_text


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
    assert made.context == length
    # The items begin with the context's last token.
    context = Letters.decode(made.ids[: length - 1])
    tasks = [item.task for item in made.items]
    for task in ("needle", "multikey", "variable", "copy"):
        assert tasks.count(task) == 15
    for item in made.items:
        whole, scored = Letters.decode(item.ids[1:]), _scored(item)
        assert scored, "every token but the first is predicted"
        if item.task in ("needle", "multikey"):
            said = whole.removeprefix("\n\n")
            assert said.endswith(scored)
            assert context.count(said + ".") == 1
        if item.task == "variable":
            asked, assigned = whole.removeprefix("\n\n").split(". ")
            name, value = assigned.removeprefix("Let ").split(" = ")
            assert scored == f" {name}{value}"
            assert context.index(assigned + ".") < context.index(asked + ".")
        if item.task == "copy":
            # May end within a letter of several bytes.
            passage = bytes(item.ids[1:])
            assert bytes(made.ids[: length - 1]).count(passage) >= 1
            assert passage.strip() in read_text(text).encode(), "nothing is planted in it"
            assert item.scored == list(range(25, 41))
        if item.task == "qa":
            asked = next(q for q in questions_of(read_text(text), text) if q.completion[0] in whole)
            assert scored == asked.completion[1]
            assert asked.sentences[0].split(" ")[0] in context


def test_a_short_context_is_asked_less_about() -> None:
    assert [count_questions(n) for n in (100, 1024, 2048, 4096, 8192)] == [1, 4, 8, 15, 15]


def _scored(item: Item) -> str:
    return Letters.decode([item.ids[at] for at in item.scored])


def test_what_follows_continues_the_text_piece_by_piece() -> None:
    made = document()
    pieces = [item for item in made.items if item.task == "continue"]
    assert [item.start for item in pieces] == [8999 + 32 * i for i in range(8)]
    follows = [i for item in pieces for i in item.ids[1:]]
    assert [made.ids[item.start] for item in pieces[:-1]] == [item.ids[0] for item in pieces[:-1]]
    assert follows[: 7 * 32 - 1] == made.ids[9000:], "each comes after those before it"
    assert {item.start for item in made.items if item.task != "continue"} == {8999}
    whole, said = read_text("moby_dick"), Letters.decode(follows).strip()
    assert said in whole
    last = Letters.decode(made.ids[:8999])[-30:].strip()
    assert whole.index(last[-20:]) < whole.index(said)


def test_tasks_are_chosen_and_the_context_stays() -> None:
    whole = document()
    some = make_document(Letters(), read_text("moby_dick"), "moby_dick", 9000, 0, ("qa", "copy"))
    assert some.ids == whole.ids
    assert [x for x in whole.items if x.task in ("qa", "copy", "continue")] == some.items
    assert some.name != whole.name, "its records are not taken for the other's"


def test_documents_differ_by_seed_and_are_the_same_each_time() -> None:
    assert document(seed=1) == document(seed=1)
    assert document(seed=1).ids != document(seed=2).ids
    changed = read_text("moby_dick").replace("the", "teh")
    changed_name = make_document(Letters(), changed, "moby_dick", 9000, 0).name
    assert changed_name != document().name, "its records are not taken for the other's"
    # Seeds take the text from different places on.
    ends = [Letters.decode(document(seed=seed).items[-1].ids[1:]) for seed in range(4)]
    assert len(set(ends)) == 4


def test_a_text_that_is_just_long_enough_serves_every_seed() -> None:
    text = read_text("moby_dick")[:7400]
    for seed in range(5):
        assert make_document(Letters(), text, "short", 9000, seed).context == 9000


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"context 90000: .* tokens of the text 'moby_dick'"):
        document(length=90000)
