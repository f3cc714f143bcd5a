"""Values and texts that nobody should send, drawn from a seeded generator."""

from __future__ import annotations

import copy
import random
from typing import Any

#: Values of every JSON type, at the edges of what programs can take.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 15, 16, 17, 64, 80, 96, 128, 2048, 4096, 100_000,
    2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 16, 2**63 - 1, 2**63, -(2**63), 2**64,
    10**400, 0.0, -0.0, 0.5, 0.7, 1.0, 1.5, -0.1, 0.999999999999, 5e-324, 1e308, 2048.0, 1e18,
    float("nan"), float("inf"), float("-inf"),
    "", " ", "auto", "torch", "quest", "sketch", "64GiB", "1.5 TiB", "0GiB", "-1GiB", "1e3GiB",
    "64", "GiB", "9" * 309 + "GB", "0.0000001B", "٣GiB", "64\uff27iB", "true", "null", "NaN",
    "2048", "x" * 3000, "\0", "\n", "a\nb", "\ud800", "😀", "\u202e", "{}", "%s%n", "../..",
    "__class__", "layer", "kv_head", "page_first", "fp8_e4m3", "transfers", "step", "float32",
    [], [0], [0, 1], [0, 0], [-1], [True], [1.0], ["0"], [None], [[0]], [10**18], list(range(300)),
    {}, {"": 0}, {"detail": 0.5}, {"detail": 2}, {"x": {"y": []}}, {"__proto__": 1},
)  # fmt: skip


def hostile_value(rng: random.Random) -> Any:
    """A value of :data:`VALUES`, or a nest of them."""
    value = copy.deepcopy(rng.choice(VALUES))
    while rng.random() < 0.1:
        value = [value] if rng.random() < 0.5 else {rng.choice(("a", "budget", "")): value}
    return value


def mutated_object(rng: random.Random, value: Any) -> Any:
    """A copy of a JSON value with some of its parts replaced, renamed, removed or repeated."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        if not isinstance(value, dict | list) or not value:
            return hostile_value(rng)
        place: Any = value
        while True:
            key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
            if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.8:
                place = place[key]
                continue
            break
        change = rng.randrange(4)
        if change == 0:
            del place[key]
        elif change == 1 and isinstance(place, dict):
            place[rng.choice((f"{key}x", key[:-1], key.upper(), ""))] = place.pop(key)
        elif change == 1:
            place.insert(key, place[key])
        else:
            place[key] = hostile_value(rng)
    return value


#: Pieces of text that break parsers.
_PIECES = (
    "{", "}", "[", "]", '"', ",", ":", "\\", "null", "NaN", "-Infinity", "1e999", "0x10", "01",
    "+1", "//", "'", "\\u0000", "\\ud800", "\ufeff", "\0", "[" * 3000, '{"a":' * 3000, "9" * 5000,
    "\r", "\u2028",
)  # fmt: skip


def mutated_text(rng: random.Random, text: str) -> str:
    """A text with some characters cut, repeated, replaced or put in."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        change = rng.randrange(4)
        if change == 0:
            text = text[:at]
        elif change == 1:
            text = text[:at] + text[end:]
        elif change == 2:
            text = text[:end] + text[at:]
        else:
            text = text[:at] + rng.choice(_PIECES) + text[at:]
    return text


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Bytes with flipped bits, or with a part cut, zeroed, repeated, moved or overwritten."""
    change = rng.randrange(7)
    changed = bytearray(data)
    at, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    if change == 0:
        for _ in range(rng.choice((1, 2, 8))):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif change == 1:
        del changed[at:]
    elif change == 2:
        del changed[at:end]
    elif change == 3:
        changed[at:end] = bytes(end - at)
    elif change == 4:
        changed[at:at] = data[at:end]
    elif change == 5:
        part = changed[at:end]
        del changed[at:end]
        changed[rng.randrange(len(changed) + 1) :][:0] = part
    else:
        end = min(end, at + 64)
        changed[at:end] = rng.randbytes(end - at)
    return bytes(changed)
