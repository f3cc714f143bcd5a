"""Parse numbers on the command line, and lists that are separated by commas."""

from __future__ import annotations

import argparse


def names(text: str) -> list[str]:
    """``"quest,sketch"`` -> ``["quest", "sketch"]``."""
    return [name for name in text.split(",") if name]


def number(text: str) -> int:
    """``"64"`` -> 64.

    Raises:
        ArgumentTypeError: the value is no number, or is below 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of at least 1")
    return int(text)


def numbers(text: str) -> list[int]:
    """``"256,512"`` -> ``[256, 512]``.

    Raises:
        ArgumentTypeError: a value is no number, or is below 1.
    """
    try:
        found = [int(number) for number in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected numbers of at least 1, such as 4096 or 256,512"
        )
    return found


def ratios(text: str) -> list[float]:
    """``"0.85,1"`` -> ``[0.85, 1.0]``.

    Raises:
        ArgumentTypeError: a value is no number, or is not from 0 to 1.
    """
    try:
        found = [float(number) for number in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= ratio <= 1 for ratio in found):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected fractions from 0 to 1, such as 0.9 or 0.85,1"
        )
    return found
