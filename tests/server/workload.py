"""Prompts that the server tests share, so that dense answers are computed once per model."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tiny_models import VOCAB

NEW_TOKENS = 40


def tokens(length: int, seed: int) -> list[int]:
    """Random token ids."""
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


@dataclass(frozen=True)
class Case:
    """Prompts and how many tokens follow each."""

    prompts: list[list[int]]
    new_tokens: int = NEW_TOKENS


#: ``(model kind, case)`` to dense tokens: a fixture.
DenseTokens = Callable[[str, Case], list[list[int]]]

#: Page boundaries and their neighbours among them.
PROMPTS = Case([tokens(n, seed=n) for n in (50, 160, 333, 512, 801, 1500, 2047, 3000)])

_PREFIX = tokens(1000, seed=1)

#: Requests with a common prefix of 1,000 tokens; the first two differ after it.
SHARED = Case([_PREFIX + tokens(n, seed=n + 10) for n in (150, 333, 20)])

#: 8 x (300 + 400) tokens: more than the pool of the small server.
RETRACTED = Case([tokens(300, seed=s) for s in range(100, 108)], new_tokens=400)
