"""Synthetic tasks after RULER: sentences planted in a document, and questions about them.

RULER: https://arxiv.org/abs/2404.06654. As at the end of RULER's prompts, a question is the
beginning of its answer, so that a model that was not trained to chat can be scored too. RULER's
question sentence is left out, because on a CPU every token takes time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

#: Names of the tasks.
SYNTHETIC_TASKS = ("needle", "multikey", "variable")


@dataclass(frozen=True, kw_only=True)
class SyntheticQuestion:
    """Sentences to plant in a document, and the question that they answer.

    Attributes:
        task: name of the task.
        sentences: planted in this order.
        completion: parts of the text after the document, given and scored in turn, given first.
    """

    task: str
    sentences: tuple[str, ...]
    completion: tuple[str, ...]


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


def count_questions(length: int) -> int:
    """Questions of each task in a document of ``length`` tokens; most of it stays real text."""
    return max(1, min(_MAX_QUESTIONS, length // _TOKENS_PER_QUESTION))


def make_questions(rng: random.Random, count: int) -> list[SyntheticQuestion]:
    """Draw ``count`` questions of each task."""
    return [*_needles(rng, count), *_keys(rng, count), *_variables(rng, count)]


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10**4, 10**5))


def _needles(rng: random.Random, count: int) -> list[SyntheticQuestion]:
    found = []
    for start, kind in rng.sample(_NEEDLES, count):
        value = {
            "word": rng.choice(_WORDS.split()),
            "two words": " ".join(rng.sample(_WORDS.split(), 2)),
            "name": rng.choice(_NAMES.split()),
            "number": _number(rng),
        }[kind]
        said = f"{start} {value}."
        completion = (_SEPARATOR + start, f" {value}")
        found.append(SyntheticQuestion(task="needle", sentences=(said,), completion=completion))
    return found


def _keys(rng: random.Random, count: int) -> list[SyntheticQuestion]:
    """Sentences of one form, so that each distracts from the others."""
    found = []
    for key in rng.sample(_KEYS.split(), count):
        start, value = f"One of the special magic numbers for {key} is:", _number(rng)
        said = f"{start} {value}."
        completion = (_SEPARATOR + start, f" {value}")
        found.append(SyntheticQuestion(task="multikey", sentences=(said,), completion=completion))
    return found


def _variables(rng: random.Random, count: int) -> list[SyntheticQuestion]:
    """Variable tracking: ``second`` is set to ``first``, which is set to a value.

    Both ``first`` and the value are scored.
    """
    found = []
    names = rng.sample(_WORDS.split(), 2 * count)
    for first, second in zip(names[::2], names[1::2], strict=True):
        value = _number(rng)
        said = (f"Let {first} = {value}.", f"Let {second} = {first}.")
        completion = (_SEPARATOR + f"Let {second} =", f" {first}", f". Let {first} = ", value)
        found.append(SyntheticQuestion(task="variable", sentences=said, completion=completion))
    return found
