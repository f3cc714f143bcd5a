"""Exceptions that hisparse raises.

::

    HiSparseError
    ├── ConfigError        a setting cannot be used (also a ValueError)
    ├── CapacityError      host or device memory is too small for one request
    ├── PluginError        a hook into SGLang did not take
    └── KernelError        a tensor handed to a kernel has the wrong shape, dtype, device or stride
                           (also a ValueError)

Every message is one line: what was got, what was expected, what the choices are.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CapacityError",
    "ConfigError",
    "HiSparseError",
    "KernelError",
    "PluginError",
    "one_line",
    "unknown_name",
]


class HiSparseError(Exception):
    """Base class of every exception that hisparse raises on purpose."""


class ConfigError(HiSparseError, ValueError):
    """A setting, or a combination of settings, cannot be used."""


class CapacityError(HiSparseError):
    """Host or device memory does not hold even one request."""


class PluginError(HiSparseError):
    """A hook into SGLang did not take."""


class KernelError(HiSparseError, ValueError):
    """A tensor handed to a kernel is not what the kernel takes."""


def unknown_name(kind: str, got: str, choices: Iterable[str]) -> str:
    """One line for a name that is not among ``choices``: the closest ones first, then all."""
    known = sorted(choices)
    close = difflib.get_close_matches(got, known, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"unknown {kind} {got!r}{hint} (choices: {', '.join(known) or 'none'})"


def one_line(error: Exception) -> str:
    """Another package's exception in one line of at most 200 characters."""
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"[:200]
