"""Parses and formats memory sizes; parses times."""

import re
from fractions import Fraction
from typing import Final

from hisparse.errors import ConfigError, quoted

#: Bytes, a size such as "64GiB", or a fraction in (0, 1) of the free memory.
MemorySize = int | float | str

_UNITS: Final = {"B": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("iB", 1024), ("B", 1000))
    for power, prefix in enumerate("KMGT", start=1)
}
_NUMBER = r"\s*(\d{1,40}(?:\.\d{1,40})?)\s*"
_SIZE = re.compile(_NUMBER + r"([A-Za-z]+)\s*", re.ASCII)
_SECONDS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(_NUMBER + r"(us|ms|s)\s*", re.ASCII)


def parse_memory(key: str, value: MemorySize) -> int | float:
    """Parse a memory size: bytes as an int, or a fraction as a float.

    Args:
        key: name of the setting, for messages.
        value: the setting.

    Raises:
        ConfigError: the value is neither a size below 8 EiB nor a fraction.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        units = {unit.lower(): factor for unit, factor in _UNITS.items()}
        if match is None or match[2].lower() not in units:
            raise ConfigError(
                f"{key}: got {quoted(value)}, expected a size such as '64GiB' "
                f"(units: {', '.join(_UNITS)})"
            )
        value = int(Fraction(match[1]) * units[match[2].lower()])
    if isinstance(value, float) and not 0 < value < 1:
        raise ConfigError(f"{key}: got {value}, expected a fraction in (0, 1) or whole bytes")
    if not 0 < value < 2**63:
        raise ConfigError(f"{key}: got {quoted(value)} bytes, expected more than 0, below 8 EiB")
    return value


def resolve_memory(value: MemorySize, free_bytes: int, key: str) -> int:
    """Convert a setting to bytes.

    Args:
        value: the setting.
        free_bytes: free memory of the machine.
        key: name of the setting, for messages.

    Raises:
        ConfigError: the setting asks for more than ``free_bytes``.
    """
    size = parse_memory(key, value)
    num_bytes = int(size * free_bytes) if isinstance(size, float) else size
    if num_bytes > free_bytes:
        raise ConfigError(
            f"{key}: got {quoted(value)} = {format_bytes(num_bytes)}, but "
            f"{format_bytes(free_bytes)} is free; expected a smaller size, or a fraction in (0, 1) "
            "of the free memory"
        )
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """Format a size, such as "1.5 GiB"."""
    power = min((max(num_bytes, 1).bit_length() - 1) // 10, 4)
    return f"{num_bytes / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def parse_seconds(key: str, text: str) -> float:
    """Parse a time above 0: "30ms" -> 0.03.

    Args:
        key: name of the flag, for messages.
        text: a number and a unit.

    Raises:
        ConfigError: the text is no such time.
    """
    match = _TIME.fullmatch(text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < seconds < 1e9:
        raise ConfigError(
            f"{key}: got {quoted(text)}, expected a time above 0 such as '30ms' "
            f"(units: {', '.join(_SECONDS)})"
        )
    return seconds
