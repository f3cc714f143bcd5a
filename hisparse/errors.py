"""Exceptions that hisparse raises.

::

    HiSparseError
    ├── ConfigError        a setting is invalid (also a ValueError)
    ├── CapacityError      host or device memory is too small for one request
    ├── PluginError        a hook into SGLang has no effect
    ├── AlgorithmError     an algorithm or an extension raised, or returned what it must not
    └── KernelError        a kernel argument has the wrong shape, dtype, device or stride
                           (also a ValueError)

Every message is one line with the value it got, the value it expected, and the choices.
"""

import difflib
import reprlib
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path


class HiSparseError(Exception):
    """Base class of every exception that hisparse raises on purpose."""


class ConfigError(HiSparseError, ValueError):
    """A setting, or a combination of settings, is invalid."""


class CapacityError(HiSparseError):
    """Host or device memory is too small."""


class PluginError(HiSparseError):
    """A hook into SGLang has no effect."""


class AlgorithmError(HiSparseError):
    """An algorithm or an extension raised an exception, or returned what it must not.

    The message names its class and module, the layer and the method. Only the requests of the
    current batch are affected.
    """


class KernelError(HiSparseError, ValueError):
    """A kernel argument has the wrong shape, dtype, device or stride."""


#: Numbers of a list that a message shows.
_NUM_SHOWN = 16
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 200


def quoted(value: object) -> str:
    """What was given, for a message: its ``repr``, without the middle if that is long."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    return _short.repr(value)


def shorten(numbers: Sequence[int]) -> str:
    """The first 16 numbers of a list, for a message."""
    more = ", ..." if len(numbers) > _NUM_SHOWN else ""
    return f"[{', '.join(map(str, numbers[:_NUM_SHOWN]))}{more}]"


def unknown_name(kind: str, got: str, choices: Iterable[str]) -> str:
    """One line for an unknown name: the closest ``choices`` first, then all of them."""
    known = sorted(choices)
    close = difflib.get_close_matches(got, known, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"unknown {kind} {quoted(got)}{hint} (choices: {', '.join(known) or 'none'})"


def one_line(error: BaseException) -> str:
    """One line of at most 200 characters for an exception of another package."""
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first}"[:200]


def explain(error: BaseException, owner: type) -> str:
    """An exception and the line that raised it, if possible a line of the file of ``owner``."""
    frames = traceback.extract_tb(error.__traceback__)
    source = getattr(sys.modules.get(owner.__module__), "__file__", None)
    frame = ([f for f in frames if f.filename == source] or frames)[-1]
    return f"{one_line(error)} ({Path(frame.filename).name}, line {frame.lineno})"
