"""Other implementations that the benchmarks time beside hisparse."""

from __future__ import annotations

from collections.abc import Callable

from hisparse.errors import one_line

__all__ = ["reason_to_leave_out"]


def reason_to_leave_out(check: Callable[[], bool]) -> str:
    """Why a peer is left out of a benchmark; "" if it runs and agrees.

    Args:
        check: runs the peer once and compares its results.
    """
    try:
        return "" if check() else "its results differ"
    except ImportError:
        return "not installed"
    except Exception as error:  # A peer that fails must not stop the benchmark of the others.
        return one_line(error)
