"""Documents of a given length, and the items that are scored after them."""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

from hisparse.errors import ConfigError
from hisparse.eval.synthetic_tasks import (
    SYNTHETIC_TASKS,
    SyntheticQuestion,
    count_questions,
    make_questions,
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question that one place of a text answers, worded differently from the text.

    Those in ``texts/questions.json`` were chosen from 311 candidates with a dense model,
    qwen2.5-coder-0.5b: it answers them correctly, in at most 6 tokens, after 4,096 tokens of the
    text, and wrongly without the text. So the dense score of that model is high by construction,
    and the questions measure how much of it a sparse method keeps.

    Attributes:
        evidence: the sentences of the text that contain the answer, verbatim.
        prompt: given after the text, up to the answer.
        answer: expected after the prompt.
    """

    evidence: str
    prompt: str
    answer: str


def questions_of(text: str, name: str) -> list[Question]:
    """Questions whose evidence lies in a text or a part of it, in the order of the evidence.

    Args:
        text: the text, or a part of it.
        name: name of the text; only those in ``hisparse.eval.texts.TEXTS`` have questions.
    """
    file = resources.files("hisparse.eval.texts") / "questions.json"
    found = json.loads(file.read_text(encoding="utf-8")).get(name, [])
    return [Question(**fields) for fields in found if fields["evidence"] in text]


#: Tasks on the text itself: questions, passages to copy, and the text that follows the context.
QA, COPY, CONTINUE = "qa", "copy", "continue"
#: Tasks to choose from; ``CONTINUE`` always runs.
TASKS = (*SYNTHETIC_TASKS, QA, COPY)
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


@dataclass(frozen=True, kw_only=True)
class Item:
    """Tokens that are fed one by one after a document, some of them scored.

    Attributes:
        task: name of the task.
        start: tokens of the document that come before the item.
        ids: token ids.
        scored: indices in ``ids`` of the answer's tokens, ascending, from 1 on. The others are
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
        items: each is read on its own, after the document up to its start.
    """

    name: str
    context: int
    ids: list[int]
    items: list[Item]


class _Completion(NamedTuple):
    """An item before its leading token is added: ``scored`` indexes ``ids``, and ``after`` counts
    the tokens between the context and the item.
    """

    task: str
    ids: list[int]
    scored: Sequence[int]
    after: int = 0


class _Stretch(NamedTuple):
    """A part of a text, tokenized.

    Attributes:
        sentences: token ids of the sentences that go into the context.
        text: the same as text, without the first sentence, which may be cut.
        following: token ids after them.
    """

    sentences: list[list[int]]
    text: str
    following: list[int]


def make_document(
    tokenizer: Any,
    text: str,
    name: str,
    length: int,
    seed: int,
    tasks: Collection[str] = TASKS,
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
    planted = make_questions(rng, count)
    begin: list[int] = tokenizer("").input_ids
    space = length - len(begin)
    space -= sum(len(_encode(tokenizer, f" {s}")) for p in planted for s in p.sentences)
    stretch = _take_stretch(tokenizer, text, name, length, space, rng if seed else None)
    context = [*begin, *_spread(tokenizer, stretch.sentences, planted, rng)]
    completions = [_complete(tokenizer, p.task, p.completion) for p in planted]
    asked = questions_of(stretch.text, name)
    for question in rng.sample(asked, min(count + _EXTRA_QUESTIONS, len(asked))):
        completions.append(_complete(tokenizer, QA, (question.prompt, question.answer)))
    completions += _passages(stretch.sentences, count, rng)
    completions = [completion for completion in completions if completion.task in tasks]
    pieces = range(0, _CONTINUED, _PIECE)
    completions += [
        _Completion(CONTINUE, stretch.following[at : at + _PIECE], range(_PIECE), at)
        for at in pieces
    ]
    ids = context + stretch.following[: pieces[-1]]
    items = [_lead(completion, ids, length) for completion in completions]
    # The digest keeps records of other contents with the same text, length and seed apart.
    digest = zlib.crc32(repr((ids, items)).encode())
    name = f"{name}-{length}-{seed}-{digest:08x}"
    return Document(name=name, context=length, ids=ids[:-1], items=items)


def _take_stretch(
    tokenizer: Any, text: str, name: str, length: int, space: int, rng: random.Random | None
) -> _Stretch:
    """``space`` tokens of the text and those that follow; from its beginning if ``rng`` is None."""
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
    return _Stretch(taken, "".join(written[end - len(taken) + 1 : end]), following)


def _lead(completion: _Completion, ids: list[int], length: int) -> Item:
    """Put the token before the completion first, so that its own first token is predicted."""
    start = length - 1 + completion.after
    return Item(
        task=completion.task,
        start=start,
        ids=[ids[start], *completion.ids],
        scored=[at + 1 for at in completion.scored],
    )


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
    planted: Sequence[SyntheticQuestion],
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


def _complete(tokenizer: Any, task: str, completion: Sequence[str]) -> _Completion:
    """Tokenize parts that are given and scored in turn, as one text."""
    whole = _encode(tokenizer, "".join(completion))
    bounds = [0]
    for end in range(1, len(completion)):
        ids = _encode(tokenizer, "".join(completion[:end]))
        both = zip(ids, whole, strict=False)
        bounds.append(next((i for i, (a, b) in enumerate(both) if a != b), len(ids)))
    bounds.append(len(whole))
    scored = zip(bounds[1::2], bounds[2::2], strict=True)
    return _Completion(task, whole, [at for a, b in scored for at in range(a, b)])


def _passages(sentences: list[list[int]], count: int, rng: random.Random) -> list[_Completion]:
    """Beginnings of long sentences of the document, to be continued as they stand there."""
    length = _GIVEN + _COPIED
    long = [p for p in sentences[1:-2] if len(p) > length + 2]
    chosen = rng.sample(long, min(count, len(long)))
    return [_Completion(COPY, p[:length], range(_GIVEN, length)) for p in chosen]
