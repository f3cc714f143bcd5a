"""Documents of a given length, and the items that are scored after them.

Planted sentences and their questions follow RULER, https://arxiv.org/abs/2404.06654. As at the end
of RULER's prompts, a question is the beginning of its answer, so that a model that was not trained
to chat can be scored too. RULER's question sentence is left out, because on a CPU every token takes
time.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from hisparse.errors import ConfigError

#: Tasks on planted sentences, and on the text itself: questions, passages to copy, and the text
#: that follows the context.
NEEDLE, MULTIKEY, VARIABLE = "needle", "multikey", "variable"
QA, COPY, CONTINUE = "qa", "copy", "continue"
SINGLE_TASKS = (NEEDLE, MULTIKEY, VARIABLE, QA, COPY)
#: Tasks whose items have several answers, each a run of scored tokens: questions one after another,
#: planted values as JSON, and a chain of sums.
LONG_TASKS = TURNS, FACTS, CHAIN = "turns", "facts", "chain"
#: Tasks to choose from; ``CONTINUE`` always runs.
TASKS = (*SINGLE_TASKS, *LONG_TASKS)
#: Sums in a chain: about 2,400 tokens.
_SUMS = 64
#: Tokens of a passage that are given and that are scored. So many are given that a dense model
#: finds the passage even if its first words occur several times.
_GIVEN, _COPIED = 24, 16
#: Tokens of the following text, and of its pieces. The pieces are read side by side, each after
#: all text before it, because a batch takes less time.
_CONTINUED, _PIECE = 256, 32
#: Questions about the text beyond those of other tasks: another text may have too few.
_EXTRA_QUESTIONS = 5
#: Sentences that a context has at least, so that planted sentences are spread out.
_MIN_SENTENCES = 16
#: Beginnings of sentences, each of another form, and the kind of value that completes it.
_NEEDLES = (
    ("The password of the harbour gate is", "two words"),
    ("The colour of the old lighthouse is", "word"),
    ("The number of barrels in the hold of the Halcyon is", "number"),
    ("The name of the watchman's dog is", "name"),
    ("The train to Brunswick leaves at platform number", "number"),
    ("The favourite dish of the tax collector is", "two words"),
    ("The secret ingredient of Mrs. Ambler's soup is", "word"),
    ("The combination of the merchant's safe is", "number"),
    ("The street where the clockmaker lives is called", "two words"),
    ("The tune that the organist plays on Sundays is", "two words"),
    ("The godmother of the innkeeper's daughter is called", "name"),
    ("The weight of the cathedral's largest bell is, in pounds,", "number"),
    ("The flower on the admiral's coat of arms is", "word"),
    ("The last book that the schoolmaster borrowed is about", "two words"),
    ("The heir to the mill by the river is", "name"),
    ("The population of the village of Tansley is", "number"),
    ("The wood that the fiddle was carved from is", "word"),
    ("The sign above the tailor's door shows", "two words"),
)
_WORDS = """
amber basil cedar cobalt copper crimson ebony falcon ginger hazel heron indigo ivory jasper juniper
lantern lemon maple marble meadow nutmeg olive opal orchid otter pepper plum raven saffron sage
scarlet silver sparrow thistle velvet violet walnut willow
"""
_NAMES = """
Barnaby Clementine Dorothea Ferdinand Gideon Hortense Leopold Matilda Octavia Rupert
"""
_KEYS = """
anchor bishop candle dolphin engine feather garden hammer island jacket kettle ladder mirror needle
orchard pillow quarry ribbon saddle tunnel umbrella valley window yarn zebra
"""
#: Between the text and a question.
_SEPARATOR = "\n\n"

#: Questions of each task in a document, at most, and tokens of context per question.
_MAX_QUESTIONS, _TOKENS_PER_QUESTION = 15, 256


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question, and the sentences that answer it.

    Attributes:
        task: name of the task.
        sentences: planted in this order, or sentences of the text, verbatim.
        completion: parts of the text after the document, given and scored in turn, given first.
    """

    task: str
    sentences: tuple[str, ...] = ()
    completion: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Item:
    """Tokens that are fed one by one after a document, some of them scored.

    Attributes:
        task: name of the task.
        start: tokens of the document that come before the item.
        ids: token ids; the first is the document's own, so that the next one is predicted.
        scored: indices in ``ids`` of the answers' tokens, ascending, from 1 on. The others are
            given.
    """

    task: str
    start: int
    ids: list[int]
    scored: list[int]


@dataclass(frozen=True, kw_only=True)
class Document:
    """A context, the text that follows it, and the items.

    Attributes:
        name: text, length and seed, and a digest of all tokens that are read.
        context: tokens of the context.
        ids: token ids of the context without its last token, which each item begins with, and of
            the following text up to the last start of an item.
        items: each is read separately, after the document up to its start.
    """

    name: str
    context: int
    ids: list[int]
    items: list[Item]


def make_document(
    tokenizer: Any,
    text: str,
    name: str,
    length: int,
    seed: int,
    tasks: Collection[str] = SINGLE_TASKS,
) -> Document:
    """A document of ``length`` tokens with planted sentences, and its items.

    Args:
        tokenizer: a transformers tokenizer.
        text: long enough for the context without the planted sentences, and for what follows it.
        name: name of the text.
        length: tokens of the context.
        seed: draws the planted sentences and their places.
        tasks: a choice of :data:`TASKS`; the context does not depend on it.

    Raises:
        ConfigError: the text is too short.
    """
    rng = random.Random(f"{name} {seed}")
    count = count_questions(length)
    planted = [*_needles(rng, count), *_keys(rng, count), *_variables(rng, count)]
    begin: list[int] = tokenizer("").input_ids
    space = length - len(begin)
    space -= sum(len(_encode(tokenizer, f" {s}")) for p in planted for s in p.sentences)
    sentences, taken, following = _take_stretch(
        tokenizer, text, name, length, space, rng if seed else None
    )
    ids = [*begin, *_spread(tokenizer, sentences, planted, rng), *following]
    items: list[Item] = []

    def add(task: str, completion: list[int], scored: Iterable[int], after: int = 0) -> None:
        start = length - 1 + after
        if task in (*tasks, CONTINUE):
            places = [at + 1 for at in scored]
            own = [ids[start], *completion]
            items.append(Item(task=task, start=start, ids=own, scored=places))

    asked = questions_of(taken, name)
    asked = rng.sample(asked, min(count + _EXTRA_QUESTIONS, len(asked)))
    for question in (*planted, *asked):
        add(question.task, *_complete(tokenizer, question.completion))
    for passage in _passages(sentences, count, rng):
        add(COPY, passage, range(_GIVEN, len(passage)))
    facts = [x for x in planted if x.task != VARIABLE]
    long = (*_turns(rng, [*facts, *asked]), _facts(rng, facts), _chain(rng))
    for question in (question for question in long if question.task in tasks):
        add(question.task, *_complete(tokenizer, question.completion))
    for at in range(0, _CONTINUED, _PIECE):
        add(CONTINUE, following[at : at + _PIECE], range(_PIECE), at)
    ids = ids[: length + _CONTINUED - _PIECE]
    # The digest tells apart documents with equal text, length and seed but other contents.
    digest = zlib.crc32(repr((ids, items)).encode())
    name = f"{name}-{length}-{seed}-{digest:08x}"
    return Document(name=name, context=length, ids=ids[:-1], items=items)


def questions_of(text: str, name: str) -> list[Question]:
    """Questions whose evidence is in a text or a part of it, in the order of the evidence.

    Those in ``texts/questions.json`` were chosen from 311 candidates with a dense model,
    qwen2.5-coder-0.5b: it answers them correctly, in at most 6 tokens, after 4,096 tokens of the
    text, and wrongly without the text. So the dense score of that model is high by construction,
    and the questions measure how much of it a sparse method keeps. They are worded differently from
    the text.

    Args:
        text: the text, or a part of it.
        name: name of the text; only those in ``hisparse.eval.texts.TEXTS`` have questions.
    """
    file = resources.files("hisparse.eval.texts") / "questions.json"
    return [
        Question(task=QA, sentences=(x["evidence"],), completion=(x["prompt"], x["answer"]))
        for x in json.loads(file.read_text(encoding="utf-8")).get(name, [])
        if x["evidence"] in text
    ]


def count_questions(length: int) -> int:
    """Questions of each task in a document of ``length`` tokens; most of it stays real text."""
    return max(1, min(_MAX_QUESTIONS, length // _TOKENS_PER_QUESTION))


def _needles(rng: random.Random, count: int) -> list[Question]:
    found = []
    for start, kind in rng.sample(_NEEDLES, count):
        value = {
            "word": rng.choice(_WORDS.split()),
            "two words": " ".join(rng.sample(_WORDS.split(), 2)),
            "name": rng.choice(_NAMES.split()),
            "number": _number(rng),
        }[kind]
        found.append(_planted(NEEDLE, start, value))
    return found


def _keys(rng: random.Random, count: int) -> list[Question]:
    """Sentences of one form, so that each distracts from the others."""
    return [
        _planted(MULTIKEY, f"One of the special magic numbers for {key} is:", _number(rng))
        for key in rng.sample(_KEYS.split(), count)
    ]


def _planted(task: str, start: str, value: str) -> Question:
    completion = (_SEPARATOR + start, f" {value}")
    return Question(task=task, sentences=(f"{start} {value}.",), completion=completion)


def _variables(rng: random.Random, count: int) -> list[Question]:
    """Variable tracking: ``second`` is set to ``first``, which is set to a value.

    Both ``first`` and the value are scored.
    """
    found = []
    names = rng.sample(_WORDS.split(), 2 * count)
    for first, second in zip(names[::2], names[1::2], strict=True):
        value = _number(rng)
        said = (f"Let {first} = {value}.", f"Let {second} = {first}.")
        completion = (_SEPARATOR + f"Let {second} =", f" {first}", f". Let {first} = ", value)
        found.append(Question(task=VARIABLE, sentences=said, completion=completion))
    return found


def _turns(rng: random.Random, asked: Sequence[Question]) -> list[Question]:
    """Three questions after one another, as in a conversation; the first one's answer is given."""
    turns = (question.completion for question in rng.sample(asked, len(asked)))
    return [
        Question(task=TURNS, completion=(f"{a}{said}.{b}", second, f".{c}", third))
        for (a, said), (b, second), (c, third) in zip(turns, turns, turns, strict=False)
    ]


def _facts(rng: random.Random, planted: Sequence[Question]) -> Question:
    """One JSON object with every planted value."""
    parts = [_SEPARATOR + "{"]
    for start, value in (x.completion for x in rng.sample(planted, len(planted))):
        parts[-1] += f'"{start.strip()}": "'
        parts += [value.strip(), '", ']
    return Question(task=FACTS, completion=tuple(parts[:-1]))


def _chain(rng: random.Random) -> Question:
    """Sums of an earlier sum, from the first half of those before, and a number.

    The earlier sum is scored, from the 16th on: it is some 300 to 2,400 tokens back.
    """
    names = rng.sample([*_WORDS.split(), *_KEYS.split(), *_NAMES.split()], _SUMS)
    sums = [rng.randrange(10, 100)]
    parts = [f"{_SEPARATOR}The {names[0]} is {sums[0]}."]
    for at in range(1, _SUMS):
        before, more = rng.randrange((at + 1) // 2), rng.randrange(1, 10) * rng.choice((1, 10))
        name, value = names[before], sums[before]
        sums.append(total := value + more)
        parts[-1] += f" Add {more} to the {name}: the {name} is"
        parts += [f" {value}", f", {value} + {more} = {total}, so the {names[at]} is {total}."]
        if at < 16:
            parts = ["".join(parts)]
    return Question(task=CHAIN, completion=tuple(parts[:-1]))


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10**4, 10**5))


def _take_stretch(
    tokenizer: Any, text: str, name: str, length: int, space: int, rng: random.Random | None
) -> tuple[list[list[int]], str, list[int]]:
    """``space`` tokens of the text and those that follow; from its beginning if ``rng`` is None.

    Returns:
        Token ids of the sentences that go into the context; the same as text, without the first
        sentence, which may be cut; token ids after them.
    """
    written = _sentences(text)
    sentences = [_encode(tokenizer, sentence) for sentence in written]
    start = _draw_start(sentences, space + _CONTINUED, rng) if rng else 0
    taken, count = _take_first(sentences[start:], space)
    end = start + count
    following = [i for ids in sentences[end:] for i in ids][:_CONTINUED]
    if len(taken) < _MIN_SENTENCES or len(following) < _CONTINUED:
        have = sum(map(len, sentences))
        raise ConfigError(
            f"context {length}: {max(space, 0)} tokens of the text {name!r}, which has {have}, go "
            f"into the context; expected {_MIN_SENTENCES} sentences there, and {_CONTINUED} tokens "
            "after them"
        )
    return taken, "".join(written[end - len(taken) + 1 : end]), following


def _sentences(text: str) -> list[str]:
    """Sentences, each with the space or empty line before it."""
    found = []
    for paragraph in text.split("\n\n"):
        first, *others = re.split(r"(?<=[.!?;]) (?=\S)", paragraph)
        found += ["\n\n" + first, *(" " + sentence for sentence in others)]
    return found


def _draw_start(sentences: list[list[int]], needed: int, rng: random.Random) -> int:
    """A sentence from which at least ``needed`` tokens are left; the first if there is none."""
    left, last = 0, len(sentences)
    while last > 0 and left < needed:
        last -= 1
        left += len(sentences[last])
    return rng.randrange(last + 1)


def _take_first(sentences: list[list[int]], space: int) -> tuple[list[list[int]], int]:
    """The first sentences, ``space`` tokens together, and how many sentences were needed.

    Tokens beyond ``space`` are cut off at the beginning.
    """
    taken: list[list[int]] = []
    while space > 0 and len(taken) < len(sentences):
        space -= len(sentences[len(taken)])
        taken.append(sentences[len(taken)])
    count, excess = len(taken), -space
    while taken and excess >= len(taken[0]):
        excess -= len(taken.pop(0))
    return [taken[0][excess:], *taken[1:]] if taken else [], count


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def _spread(
    tokenizer: Any,
    sentences: list[list[int]],
    planted: Sequence[Question],
    rng: random.Random,
) -> list[int]:
    """Plant sentences between those of the text; a question's sentences keep their order."""
    placed: list[tuple[float, list[int]]] = []
    for question in planted:
        places = sorted(rng.uniform(0.5, len(sentences) - 1) for _ in question.sentences)
        planted_ids = (_encode(tokenizer, f" {sentence}") for sentence in question.sentences)
        placed += zip(places, planted_ids, strict=True)
    placed += [(float(i), ids) for i, ids in enumerate(sentences)]
    return [i for _, ids in sorted(placed, key=lambda x: x[0]) for i in ids]


def _complete(tokenizer: Any, completion: Sequence[str]) -> tuple[list[int], list[int]]:
    """Tokenize parts, given and scored in turn, as one text; return ids and scored indices."""
    whole = _encode(tokenizer, "".join(completion))
    bounds = [0]
    for end in range(1, len(completion)):
        ids = _encode(tokenizer, "".join(completion[:end]))
        both = zip(ids, whole, strict=False)
        bounds.append(next((i for i, (a, b) in enumerate(both) if a != b), len(ids)))
    bounds.append(len(whole))
    scored = zip(bounds[1::2], bounds[2::2], strict=True)
    return whole, [at for a, b in scored for at in range(a, b)]


def _passages(sentences: list[list[int]], count: int, rng: random.Random) -> list[list[int]]:
    """Beginnings of long sentences of the document, which the model has to continue verbatim."""
    length = _GIVEN + _COPIED
    long = [p for p in sentences[1:-2] if len(p) > length + 2]
    return [p[:length] for p in rng.sample(long, min(count, len(long)))]
