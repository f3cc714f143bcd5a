"""Documents of a given length, and what is asked about them."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hisparse.errors import ConfigError
from hisparse.eval.facts import PLANTED, Planted, plant

__all__ = ["CONTINUE", "COPY", "Document", "Item", "make_document"]

#: Tasks that are not planted: a passage that stood earlier, and the text that follows.
COPY, CONTINUE = "copy", "continue"
#: Tokens of a passage that are given, and that have to follow; tokens of the text that follows.
_GIVEN, _COPIED, _CONTINUED = 16, 32, 96
#: Sentences that a context has at least, so that what is planted lies apart.
_LEAST = 16


@dataclass(frozen=True, kw_only=True)
class Item:
    """Something that follows a document, read token by token.

    Attributes:
        task: name of the task.
        ids: token ids.
        first: where the answer begins in ``ids``.
    """

    task: str
    ids: list[int]
    first: int


@dataclass(frozen=True, kw_only=True)
class Document:
    """A context and its items.

    Attributes:
        name: of text, length and seed.
        ids: token ids of the context.
        items: what is read after it, each on its own.
    """

    name: str
    ids: list[int]
    items: list[Item]


def make_document(tokenizer: Any, text: str, name: str, length: int, seed: int) -> Document:
    """A document of ``length`` tokens with planted sentences, and its items.

    Args:
        tokenizer: of transformers.
        text: long enough for the context, planted sentences taken off, and what continues it.
        name: of the text.
        length: tokens of the context.
        seed: draws what is planted, and where.

    Raises:
        ConfigError: the text is too short.
    """
    rng = random.Random(f"{name} {seed}")
    planted = plant(rng)
    begin: list[int] = tokenizer("").input_ids
    sentences = [_encode(tokenizer, sentence) for sentence in _sentences(text)]
    room = length - len(begin)
    room -= sum(len(_encode(tokenizer, f" {s}")) for p in planted for s in p.sentences)
    taken, after = _first(sentences, room)
    follows = [i for ids in sentences[after:] for i in ids][:_CONTINUED]
    if len(taken) < _LEAST or len(follows) < _CONTINUED:
        have = sum(map(len, sentences))
        raise ConfigError(
            f"context {length}: {max(room, 0)} tokens of the text {name!r}, which has {have}, go "
            f"into the context; expected {_LEAST} sentences there, and {_CONTINUED} tokens after "
            "them"
        )
    ids = [*begin, *_spread(tokenizer, taken, planted, rng)]
    items = [_question(tokenizer, p) for p in planted]
    items += _passages(taken, rng)
    items.append(Item(task=CONTINUE, ids=follows, first=0))
    # Each item begins with the document's last token, so that its own first one is predicted.
    led = [Item(task=x.task, ids=[ids[-1], *x.ids], first=x.first + 1) for x in items]
    return Document(name=f"{name}-{length}-{seed}", ids=ids[:-1], items=led)


def _sentences(text: str) -> list[str]:
    """Sentences, each with what stands before it: a space, or an empty line."""
    found = []
    for paragraph in text.split("\n\n"):
        first, *others = re.split(r"(?<=[.!?;]) (?=\S)", paragraph)
        found += ["\n\n" + first, *(" " + sentence for sentence in others)]
    return found


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


def _question(tokenizer: Any, planted: Planted) -> Item:
    prompt = _encode(tokenizer, "\n\n" + planted.prompt)
    whole = _encode(tokenizer, "\n\n" + planted.prompt + planted.answer)
    # Tokens are those of the whole; the answer begins where they part.
    first = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), None)
    return Item(task=planted.task, ids=whole, first=len(prompt) if first is None else first)


def _passages(sentences: list[list[int]], rng: random.Random) -> list[Item]:
    """Beginnings of long sentences of the document, to be gone on with."""
    long = [p for p in sentences[1:-2] if len(p) > _GIVEN + _COPIED + 2]
    chosen = rng.sample(long, min(PLANTED, len(long)))
    return [Item(task=COPY, ids=p[: _GIVEN + _COPIED], first=_GIVEN) for p in chosen]
