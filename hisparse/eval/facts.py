"""What is planted in a document and asked for afterwards: the tasks, after RULER.

RULER: https://arxiv.org/abs/2404.06654. Questions end with the beginning of their answer, as there,
so that a model that was not trained to chat can be judged as well.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["PLANTED", "Planted", "plant"]


@dataclass(frozen=True, kw_only=True)
class Planted:
    """Sentences to be spread over a document, and the question that they answer.

    Attributes:
        task: name of the task.
        sentences: in the order in which they come.
        prompt: what follows the document.
        answer: what has to follow then.
    """

    task: str
    sentences: tuple[str, ...]
    prompt: str
    answer: str


#: Beginnings of sentences of different forms, and what completes each.
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

#: Questions of each task in a document.
PLANTED = 5


def plant(rng: random.Random) -> list[Planted]:
    """``PLANTED`` questions of each task, drawn anew for each document."""
    return [*_needles(rng), *_keys(rng), *_variables(rng)]


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10**5, 10**6))


def _needles(rng: random.Random) -> list[Planted]:
    found = []
    for start, kind in rng.sample(_NEEDLES, PLANTED):
        value = {
            "word": rng.choice(_WORDS.split()),
            "two words": " ".join(rng.sample(_WORDS.split(), 2)),
            "name": rng.choice(_NAMES.split()),
            "number": _number(rng),
        }[kind]
        found.append(
            Planted(
                task="needle",
                sentences=(f"{start} {value}.",),
                prompt=f"Question: What does the text above say about this?\nAnswer: {start}",
                answer=f" {value}",
            )
        )
    return found


def _keys(rng: random.Random) -> list[Planted]:
    """Sentences of one form: the others are distractors to each."""
    found = []
    for key in rng.sample(_KEYS.split(), PLANTED):
        value = _number(rng)
        found.append(
            Planted(
                task="multikey",
                sentences=(f"One of the special magic numbers for {key} is: {value}.",),
                prompt=(
                    f"Question: What is the special magic number for {key} mentioned in the text "
                    f"above?\nAnswer: One of the special magic numbers for {key} is:"
                ),
                answer=f" {value}",
            )
        )
    return found


def _variables(rng: random.Random) -> list[Planted]:
    """Variable tracking: a value, and a variable that gets it from the first."""
    found = []
    names = rng.sample(_WORDS.split(), 2 * PLANTED)
    for first, second in zip(names[::2], names[1::2], strict=True):
        value = _number(rng)
        found.append(
            Planted(
                task="variable",
                sentences=(f"VAR {first} = {value}.", f"VAR {second} = VAR {first}."),
                prompt=(
                    f"Question: Which value has VAR {second}, which was set to another variable?\n"
                    f"Answer: VAR {second} = VAR"
                ),
                answer=f" {first}. VAR {first} = {value}",
            )
        )
    return found
