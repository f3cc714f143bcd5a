"""Questions about the texts that hisparse ships, worded differently from the text.

Those in ``texts/questions.json`` were chosen from 311 candidates with a dense model,
qwen2.5-coder-0.5b: it answers them correctly, in at most 6 tokens, after 4,096 tokens of the text,
and wrongly without the text. So the dense score of that model is high by construction, and the
questions measure how much of it a sparse method keeps.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question that one place of a text answers.

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
