"""Question answering over the texts that hisparse ships: what stands in them, in other words.

``texts/questions.json`` beside this holds them. ``scripts/curate_questions.py`` chose them from 311
candidates with a dense model, qwen2.5-coder-0.5b: kept is what it answers right after 4,096 tokens
of the text, and wrong without them, in at most 6 tokens. So the score of that model's dense
attention on them is high by construction; they tell how much of it a sparse method keeps.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

__all__ = ["Question", "questions_of"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a text answers in one place.

    Attributes:
        evidence: the sentences of the text that hold the answer, as they stand there.
        prompt: what follows the text, up to the answer.
        answer: what has to follow then.
    """

    evidence: str
    prompt: str
    answer: str


def questions_of(text: str, name: str) -> list[Question]:
    """Questions that a text, or a part of it, answers, in the order of their evidence.

    Args:
        text: the text, or the part.
        name: of the text, see ``hisparse.eval.texts.TEXTS``; others have no questions.
    """
    file = resources.files("hisparse.eval.texts") / "questions.json"
    found = json.loads(file.read_text(encoding="utf-8")).get(name, [])
    return [Question(**fields) for fields in found if fields["evidence"] in text]
