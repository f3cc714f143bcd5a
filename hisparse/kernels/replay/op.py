"""Replay of recorded selections: what caches of other sizes would have held.

All pages of a selection are resident at once: hits are counted before the step, and no page that is
selected is evicted, as in ``lru_diff``. Nothing here runs in a decode step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from hisparse.errors import KernelError, unknown_name
from hisparse.kernels.arguments import Arg
from hisparse.kernels.operation import Operation

__all__ = ["POLICIES", "Selections", "replay", "stack_depths"]

#: Replacement policies that ``replay`` knows.
POLICIES: Final = ("lru", "belady")


class Selections(NamedTuple):
    """Selections of several streams; a stream is one request's row in one layer.

    Attributes:
        pages: ``[N] int32``, the pages of all selections.
        offsets: ``[M + 1] int64``, the first page of each of M selections.
        streams: ``[S + 1] int64``, the first selection of each stream; none is empty.
        full_pages: ``[M] int32``, complete pages of the context at each selection. A stream starts
            with the most recent of them in the cache, as after a prefill; pages that are completed
            between two selections enter it as the hottest. All 0: it starts empty.
    """

    pages: Tensor
    offsets: Tensor
    streams: Tensor
    full_pages: Tensor

    @property
    def num_pages(self) -> int:
        """One more than the largest page."""
        completed = int(self.full_pages.max()) if len(self.full_pages) else 0
        return max(1, completed, int(self.pages.max()) + 1 if len(self.pages) else 0)

    @property
    def widest(self) -> int:
        """Pages of the longest selection."""
        return int(self.offsets.diff().max()) if len(self.offsets) > 1 else 0


_SELECTIONS = (
    Arg("pages", torch.int32, "N", layout="all"),
    Arg("offsets", torch.int64, "M+1", layout="all"),
    Arg("streams", torch.int64, "_", layout="all"),
    Arg("full_pages", torch.int32, "M", layout="all"),
)
STACK_DEPTHS = Operation(__name__, "stack_depths", *_SELECTIONS)
REPLAY = Operation(__name__, "replay", *_SELECTIONS)


def stack_depths(selections: Selections, depth: int, *, impl: str = "auto") -> Tensor:
    """Count how deep in the LRU stack each selected page was: LRU of every size in one pass.

    A page at depth d hits in each cache of more than d pages (Mattson et al., 1970), if the cache
    holds a whole selection. The pages of a selection become the hottest: first those that were
    absent, in their order, then the others in their old order. ``lru_diff`` orders them by what is
    absent from a cache of its size, so the counts of ``replay`` differ a little.

    Args:
        selections: the selections.
        depth: D; deeper pages are counted as absent.
        impl: "auto", or an implementation's name.

    Returns:
        ``[S, D + 1] int64``, pages by depth; the last entry counts absent ones.

    Raises:
        KernelError: a tensor has another shape, dtype or device, or a value is out of range.
    """
    run = STACK_DEPTHS(impl, *selections)
    _check_values(selections)
    if depth < 1:
        raise KernelError(f"depth: got {depth}, expected at least 1")
    counts: Tensor = run(selections, depth)
    return counts


def replay(
    selections: Selections, policy: str, sizes: Sequence[int], *, impl: str = "auto"
) -> Tensor:
    """Count the hits of a replacement policy in caches of several sizes.

    Policies: "lru" in the exact order of ``lru_diff``; "belady" evicts the page that is selected
    last of all, so that no policy hits more often.

    Args:
        selections: the selections.
        policy: one of ``POLICIES``.
        sizes: pages of each cache, at least those of the longest selection.
        impl: "auto", or an implementation's name.

    Returns:
        ``[S, len(sizes)] int64``, selected pages that were in the cache.

    Raises:
        KernelError: a tensor has another shape, dtype or device, a value is out of range, or there
            is no such policy.
    """
    run = REPLAY(impl, *selections)
    _check_values(selections)
    if policy not in POLICIES:
        raise KernelError(unknown_name("policy", policy, POLICIES))
    least = max(1, selections.widest)
    if not sizes or min(sizes) < least or max(sizes) >= 2**31:
        raise KernelError(
            f"sizes: got {list(sizes)}, expected pages, at least the {least} of the longest "
            "selection"
        )
    hits: Tensor = run(selections, policy, list(sizes))
    return hits


def _check_values(selections: Selections) -> None:
    pages, offsets, streams, full_pages = selections
    for name, starts, end, least in (
        ("offsets", offsets, len(pages), 0),
        ("streams", streams, len(offsets) - 1, 1),
    ):
        steps = starts.diff()
        if len(starts) == 0 or starts[0] != 0 or starts[-1] != end or (steps < least).any():
            raise KernelError(f"{name}: expected ascending numbers from 0 to {end}")
    if (pages < 0).any() or (full_pages < 0).any():
        raise KernelError("pages, full_pages: got a negative number, expected 0 or more")
