"""An implementation that raises where the CUDA operations leave an index alone.

The CPU operations refuse an index that is out of range; the CUDA operations skip it, and
``hisparse.kernels.verify_indices`` reports it. With both, one suite covers every implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hisparse.kernels import verify_diff, verify_indices

__all__ = ["verified"]


def verified(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """An operation's function, with its indices verified."""

    def run(*args: Any) -> Any:
        _BEFORE.get(name, lambda *args: None)(*args)
        result = function(*args)
        if name == "diff_tables":
            verify_diff(result[5], *args[:2])  # num_misses
        return result

    return run


def _promote_tail(rows: Any, page_index: Any, filled: Any, capacity: Any, *state: Any) -> None:
    num_states, slots = state[0].slot_pages.shape
    verify_indices("rows", rows, 0, num_states)
    verify_indices("capacity", capacity, 0, slots + 1)


def _changed_rows(rows: Any, *tensors: Any) -> None:
    states = next(x for x in tensors if hasattr(x, "slot_pages"))
    verify_indices("rows", rows, 0, states.slot_pages.shape[1])


def _gather_pages(src: Any, src_pages: Any, dst: Any, dst_pages: Any, heads: int) -> None:
    verify_indices("src_pages", src_pages, -1, src[0].shape[-4])
    verify_indices("dst_pages", dst_pages, -1, dst[0].shape[-4])


def _slots(slots: Any, pool: Any) -> None:
    verify_indices("slots", slots, 0, pool.shape[-4] * pool.shape[-2])


_BEFORE: dict[str, Callable[..., None]] = {
    "promote_tail": _promote_tail,
    "reset_rows": _changed_rows,
    "rebalance": _changed_rows,
    "gather_pages": _gather_pages,
    "scatter_tokens": lambda dst, tokens, slots: _slots(slots, dst[0]),
    "gather_tokens": lambda src, slots, tokens: _slots(slots, src[0]),
}
