"""What a document holds, and what is asked about it."""

from __future__ import annotations

import json
import re
from itertools import groupby
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


def long_items(task: str) -> tuple[list[str], list[list[str]]]:
    """The texts of a task's items, and their answers: what ``ItemScores`` takes apart."""
    made = make_document(Letters(), read_text("moby_dick"), "moby_dick", 9000, 3, (task,))
    assert made.ids == document(seed=3).ids, "the context is that of other tasks"
    items = [item for item in made.items if item.task == task]
    answers = []
    for item in items:
        runs = [list(run) for _, run in groupby(enumerate(item.scored), lambda x: x[1] - x[0])]
        answers.append([Letters.decode([item.ids[at] for _, at in run]) for run in runs])
    return [Letters.decode(item.ids[1:]) for item in items], answers


def test_second_and_third_questions_are_scored_after_the_first() -> None:
    single = {Letters.decode(x.ids[1:]): _scored(x) for x in document(seed=3).items}
    texts, answers = long_items("turns")
    assert len(texts) >= 10
    asked = []
    for text, scored in zip(texts, answers, strict=True):
        first, *others = re.split(r"\.(?=\n\n)", text)
        assert [single[turn] for turn in others] == scored
        asked += [first, *others]
    assert len(set(asked)) == len(asked) == 3 * len(texts)
    assert set(asked) <= single.keys(), "each is a question that another task asks by itself"


def test_all_planted_values_go_into_one_json_object() -> None:
    (text,), (answers,) = long_items("facts")
    found = json.loads(text + '"}')
    assert list(found.values()) == answers
    assert len(found) == 30
    context = Letters.decode(document(seed=3).ids)
    assert all(f"{start} {value}." in context for start, value in found.items())


def test_a_chain_of_sums_is_right_and_needs_sums_far_back() -> None:
    (text,), (answers,) = long_items("chain")
    first, *steps = text.strip().split(" Add ")
    _, name, _, value = re.findall(r"\w+", first)
    names, sums, scored = [name], {name: int(value)}, []
    for at, step in enumerate(steps, 1):
        asked, _, told = step.partition(", ")
        more, _, _, name, _, again, _, earlier = re.findall(r"\w+", asked)
        assert name == again
        assert int(earlier) == sums[name]
        if at >= 16:
            assert names.index(name) <= at / 2
            scored.append(f" {earlier}")
        if told:
            a, b, total, _, _, new, _, same = re.findall(r"\w+", told)
            assert (a, b, int(total)) == (earlier, more, sums[name] + int(more))
            assert total == same
            assert new not in sums
            names.append(new)
            sums[new] = int(total)
    assert scored == answers
    assert (len(steps), len(names)) == (63, 63), "the last ends with what is scored"


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
