"""Two long texts in the public domain.

``moby_dick``: Herman Melville, chapters 1 to 8. ``state_of_the_union``: Abraham Lincoln's messages
of 1862 and 1863; the paragraphs of six sentences are ours.
"""

from __future__ import annotations

from importlib import resources

__all__ = ["TEXTS", "read_text"]

#: Names of the texts, each of about 80,000 characters.
TEXTS = ("moby_dick", "state_of_the_union")


def read_text(name: str) -> str:
    """The text of this name, one of :data:`TEXTS`."""
    return resources.files(__name__).joinpath(f"{name}.txt").read_text(encoding="utf-8")
