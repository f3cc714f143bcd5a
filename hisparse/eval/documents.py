"""Documents of a given length, and what is asked about them."""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hisparse.errors import ConfigError
from hisparse.eval.questions import questions_of
from hisparse.eval.synthetic_tasks import PLANTED, Planted, count_questions, plant

__all__ = ["CONTINUE", "COPY", "TASKS", "Document", "Item", "make_document"]

#: Tasks that are not planted: what the text says, a passage of it, and what follows it.
QA, COPY, CONTINUE = "qa", "copy", "continue"
#: What may be chosen from; the text that follows is always read.
TASKS = (*PLANTED, QA, COPY)
#: Tokens of a passage that are given, enough for a dense model to know the place where words occur
#: at several, and that have to follow.
_GIVEN, _COPIED = 24, 16
#: Tokens of the text that follows, and of its pieces, read side by side, each after all that is
#: before it: that takes less time.
_CONTINUED, _PIECE = 256, 32
#: Questions about the text beyond those of other tasks: another text may have too few.
_MORE = 5
#: Sentences that a context has at least, so that what is planted lies apart.
_LEAST = 16


@dataclass(frozen=True, kw_only=True)
class Item:
    """Something that follows a document, read token by token.

    Attributes:
        task: name of the task.
        start: tokens of the document that it follows.
        ids: token ids.
        judged: where in ``ids`` the tokens of the answer are, ascending, from 1 on: the others are
            given.
    """

    task: str
    start: int
    ids: list[int]
    judged: list[int]


@dataclass(frozen=True, kw_only=True)
class Document:
    """A context, what continues it, and the items.

    Attributes:
        name: of text, length and seed, and a digest of all that is read.
        context: tokens of the context.
        ids: token ids of the context but the last, which items begin with, and of the text that
            continues it as far as items start there.
        items: what is read after the document up to their start, each on its own.
    """

    name: str
    context: int
    ids: list[int]
    items: list[Item]


class _Read(NamedTuple):
    """What is read, in token ids; where the answers are in it; tokens after the context before."""

    task: str
    ids: list[int]
    judged: Sequence[int]
    after: int = 0


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
        tokenizer: of transformers.
        text: long enough for the context, planted sentences taken off, and what continues it.
        name: of the text.
        length: tokens of the context.
        seed: draws what is planted, and where.
        tasks: of ``TASKS``, what is asked; the context is the same whatever that is.

    Raises:
        ConfigError: the text is too short.
    """
    rng = random.Random(f"{name} {seed}")
    count = count_questions(length)
    planted = plant(rng, count)
    begin: list[int] = tokenizer("").input_ids
    written = _sentences(text)
    sentences = [_encode(tokenizer, sentence) for sentence in written]
    room = length - len(begin)
    room -= sum(len(_encode(tokenizer, f" {s}")) for p in planted for s in p.sentences)
    start = _start(sentences, room + _CONTINUED, rng) if seed else 0
    taken, after = _first(sentences[start:], room)
    follows = [i for ids in sentences[start + after :] for i in ids][:_CONTINUED]
    if len(taken) < _LEAST or len(follows) < _CONTINUED:
        have = sum(map(len, sentences))
        raise ConfigError(
            f"context {length}: {max(room, 0)} tokens of the text {name!r}, which has {have}, go "
            f"into the context; expected {_LEAST} sentences there, and {_CONTINUED} tokens after "
            "them"
        )
    context = [*begin, *_spread(tokenizer, taken, planted, rng)]
    # The first sentence may be cut.
    said = "".join(written[start + after - len(taken) + 1 : start + after])
    asked = questions_of(said, name)
    items = [_item(tokenizer, p.task, p.completion) for p in planted]
    for question in rng.sample(asked, min(count + _MORE, len(asked))):
        items.append(_item(tokenizer, QA, (question.prompt, question.answer)))
    items += _passages(taken, count, rng)
    items = [item for item in items if item.task in tasks]
    pieces = range(0, _CONTINUED, _PIECE)
    items += [_Read(CONTINUE, follows[at : at + _PIECE], range(_PIECE), at) for at in pieces]
    ids = context + follows[: pieces[-1]]
    # Each item begins with the last token before it, so that its own first one is predicted.
    led = [
        Item(
            task=item.task,
            start=length - 1 + item.after,
            ids=[ids[length - 1 + item.after], *item.ids],
            judged=[at + 1 for at in item.judged],
        )
        for item in items
    ]
    # Records of another document of the same text, length and seed are not taken for this one's.
    digest = zlib.crc32(repr((ids, led)).encode())
    name = f"{name}-{length}-{seed}-{digest:08x}"
    return Document(name=name, context=length, ids=ids[:-1], items=led)


def _sentences(text: str) -> list[str]:
    """Sentences, each with what stands before it: a space, or an empty line."""
    found = []
    for paragraph in text.split("\n\n"):
        first, *others = re.split(r"(?<=[.!?;]) (?=\S)", paragraph)
        found += ["\n\n" + first, *(" " + sentence for sentence in others)]
    return found


def _start(sentences: list[list[int]], needed: int, rng: random.Random) -> int:
    """A sentence that at least ``needed`` tokens begin with; the first one if there is none."""
    left, last = 0, len(sentences)
    while last > 0 and left < needed:
        last -= 1
        left += len(sentences[last])
    return rng.randrange(last + 1)


def _first(sentences: list[list[int]], room: int) -> tuple[list[list[int]], int]:
    """Sentences of ``room`` tokens together, and how many of the text they are; what is too much
    is cut off at the beginning.
    """
    taken: list[list[int]] = []
    while room > 0 and len(taken) < len(sentences):
        room -= len(sentences[len(taken)])
        taken.append(sentences[len(taken)])
    count, over = len(taken), -room
    while taken and over >= len(taken[0]):
        over -= len(taken.pop(0))
    return [taken[0][over:], *taken[1:]] if taken else [], count


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


def _spread(
    tokenizer: Any, sentences: list[list[int]], planted: Sequence[Planted], rng: random.Random
) -> list[int]:
    """Sentences with the planted sentences between them, those of a question in their order."""
    placed: list[tuple[float, list[int]]] = []
    for question in planted:
        places = sorted(rng.uniform(0.5, len(sentences) - 1) for _ in question.sentences)
        planted_ids = (_encode(tokenizer, f" {sentence}") for sentence in question.sentences)
        placed += zip(places, planted_ids, strict=True)
    placed += [(float(i), ids) for i, ids in enumerate(sentences)]
    return [i for _, ids in sorted(placed, key=lambda x: x[0]) for i in ids]


def _item(tokenizer: Any, task: str, completion: Sequence[str]) -> _Read:
    """What is given and asked for in turn, as one text: tokens are those of the whole."""
    whole = _encode(tokenizer, "".join(completion))
    parted = [0]
    for end in range(1, len(completion)):
        said = _encode(tokenizer, "".join(completion[:end]))
        both = zip(said, whole, strict=False)
        parted.append(next((i for i, (a, b) in enumerate(both) if a != b), len(said)))
    parted.append(len(whole))
    asked = zip(parted[1::2], parted[2::2], strict=True)
    return _Read(task, whole, [at for a, b in asked for at in range(a, b)])


def _passages(sentences: list[list[int]], count: int, rng: random.Random) -> list[_Read]:
    """Beginnings of long sentences of the document, to be gone on with."""
    length = _GIVEN + _COPIED
    long = [p for p in sentences[1:-2] if len(p) > length + 2]
    chosen = rng.sample(long, min(count, len(long)))
    return [_Read(COPY, p[:length], range(_GIVEN, length)) for p in chosen]
