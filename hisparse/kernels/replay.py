"""Replay of recorded selections: what caches of other sizes would have held.

All pages of a selection are resident at once: hits are counted before the step, and no page that is
selected is evicted, as in ``lru_diff``. Nothing here runs in a decode step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hisparse.errors import KernelError, unknown_name
from hisparse.kernels.checks import check_tensor
from hisparse.kernels.dispatch import implementation
from hisparse.kernels.recorded import POLICIES, Selections

__all__ = ["replay", "stack_depths"]


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
    _check(selections)
    if depth < 1:
        raise KernelError(f"depth: got {depth}, expected at least 1")
    module = implementation(impl, selections.pages.device)
    counts: Tensor = module.stack_depths(selections, depth)
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
    _check(selections)
    if policy not in POLICIES:
        raise KernelError(unknown_name("policy", policy, POLICIES))
    least = max(1, selections.widest)
    if not sizes or min(sizes) < least or max(sizes) >= 2**31:
        raise KernelError(
            f"sizes: got {list(sizes)}, expected pages, at least the {least} of the longest "
            "selection"
        )
    module = implementation(impl, selections.pages.device)
    hits: Tensor = module.replay(selections, policy, list(sizes))
    return hits


def _check(selections: Selections) -> None:
    pages, offsets, streams, full_pages = selections
    check_tensor("pages", pages, torch.int32, (None,))
    check_tensor("offsets", offsets, torch.int64, (None,), pages.device)
    check_tensor("streams", streams, torch.int64, (None,), pages.device)
    check_tensor("full_pages", full_pages, torch.int32, (len(offsets) - 1,), pages.device)
    for name, starts, end, least in (
        ("offsets", offsets, len(pages), 0),
        ("streams", streams, len(offsets) - 1, 1),
    ):
        steps = starts.diff()
        if len(starts) == 0 or starts[0] != 0 or starts[-1] != end or (steps < least).any():
            raise KernelError(f"{name}: expected ascending numbers from 0 to {end}")
    if (pages < 0).any() or (full_pages < 0).any():
        raise KernelError("pages, full_pages: got a negative number, expected 0 or more")
