"""The demo's prompt: the beginning of Moby Dick with a planted sentence, and a question about it.

The text is Herman Melville's, in the public domain (chapters 1, 2 and the beginning of 3).
"""

from dataclasses import dataclass

from hisparse.eval.texts import read_text

#: Characters up to the end of a paragraph, about 7,000 tokens.
_LENGTH = 29_237


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A sentence to plant in the document, and a question that it answers.

    Attributes:
        sentence: planted as a separate paragraph.
        question: asked after the document.
        answer: a correct answer contains this, in upper or lower case.
    """

    sentence: str
    question: str
    answer: str

    def is_found_in(self, text: str) -> bool:
        """Whether a text contains the answer."""
        return self.answer.lower() in text.lower()


HARBOUR = Fact(
    sentence="The password of the harbour gate is BLUE HERRING.",
    question="What is the password of the harbour gate?",
    answer="blue herring",
)


def text() -> str:
    """The document without the planted sentence."""
    return read_text("moby_dick")[:_LENGTH]


def make_prompt(fact: Fact, depth: float) -> str:
    """The document with the fact planted, then the question: about 7,000 tokens.

    Args:
        fact: the sentence and its question.
        depth: place of the sentence, from 0 (beginning) to 1 (end).
    """
    whole = text()
    paragraphs = whole.rstrip().split("\n\n")
    before, place = 0, 0
    while place < len(paragraphs) and before < depth * len(whole):
        before += len(paragraphs[place]) + 2
        place += 1
    document = [*paragraphs[:place], fact.sentence, *paragraphs[place:]]
    return "\n\n".join([*document, f"Question: {fact.question}"])
