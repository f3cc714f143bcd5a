"""Values of flags that take several, divided by commas."""

from __future__ import annotations

import argparse

__all__ = ["names", "numbers"]


def names(text: str) -> list[str]:
    """``"quest,sketch"`` -> ``["quest", "sketch"]``."""
    return [name for name in text.split(",") if name]


def numbers(text: str) -> list[int]:
    """``"256,512"`` -> ``[256, 512]``; an error of the command line for what is not positive."""
    try:
        found = [int(number) for number in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected numbers such as 4096 or 256,512")
    return found
