"""Choosing the pages that hold a share of the attention, in Triton."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.operation import Place, choices
from hisparse.kernels.select.op import SELECT, SelectRule
from hisparse.kernels.select.reference import best_pages

_SCORES_PER_STEP = 1024


class _ShareConstants(NamedTuple):
    """What the kernel that combines heads is compiled for."""

    counted: bool  # whether there is a counter of invalid scores
    selections: int  # of a group, each counted
    group: int  # heads that share a selection
    group_block: int  # the same, rounded up to a power of two
    step: int  # pages that are read at once


def select(
    scores: Tensor,
    num_pages: Tensor,
    forced: Tensor | None,
    rest: Tensor | None,
    invalid_scores: Tensor | None,
    rule: SelectRule,
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.select`; heads agree in Triton, PyTorch chooses.

    Raises:
        KernelError: the rule has no mass, which is for CUDA C++.
    """
    if rule.mass is None:
        found = choices(SELECT, Place.of([scores]), "triton")
        raise KernelError(
            "implementation 'triton': got a rule without mass, expected one with it (choices: "
            f"{found})"
        )
    scores = scores.float()
    batch, given, width = scores.shape
    heads = min(given, rule.heads)
    combined = scores.new_empty(batch, heads, width)
    group_block = triton.next_power_of_2(given // heads)
    if combined.numel():
        _share_kernel[(heads, batch)](
            scores.contiguous(),
            scores.new_full((batch, given), -torch.inf) if rest is None else rest.contiguous(),
            num_pages.contiguous(),
            combined,
            # Not written to where there is no counter.
            num_pages if invalid_scores is None else invalid_scores,
            (width, heads),
            _ShareConstants(
                counted=invalid_scores is not None,
                selections=rule.heads // heads,
                group=given // heads,
                group_block=group_block,
                step=max(16, _SCORES_PER_STEP // group_block),
            ),
        )
    combined = combined.repeat_interleave(rule.heads // heads, dim=1)
    return best_pages(combined, num_pages, forced, rule, given)


@triton.jit
def _finite(x):
    """NaN as -inf, and inf as the largest float32, so that a difference of scores is no NaN."""
    return tl.where(x == x, tl.minimum(x, 3.4028234663852886e38), -float("inf"))


@triton.jit
def _is_invalid(x):
    """NaN or +inf."""
    return (x <= 3.4028234663852886e38) == 0


@triton.jit
def _share_kernel(
    scores,  # [B, H * group, P]
    rest,  # [B, H * group]
    num_pages,  # [B]
    combined,  # [B, H, P]
    invalid_scores,  # [1], if counted
    shape,  # P, H
    const: tl.constexpr,
):
    """The sum over a group's heads of each head's softmax over the pages and the rest."""
    width, heads = shape
    head, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count = tl.minimum(tl.load(num_pages + request), width)
    row = request * heads + head
    member, at = tl.arange(0, const.group_block), tl.arange(0, const.step)
    own = member < const.group
    source, present = scores + (row * const.group + member[:, None]) * width, own[:, None]
    beside = tl.load(rest + row * const.group + member, mask=own, other=-float("inf"))
    invalid = tl.zeros_like(at) + tl.max(_is_invalid(beside).to(tl.int32), axis=0)
    highest = _finite(beside)
    total = tl.where(highest == -float("inf"), 0.0, 1.0)
    # -inf everywhere: there is no maximum to subtract.
    top = tl.where(highest == -float("inf"), 0.0, highest)
    for start in range(0, width, const.step):
        page = start + at[None, :]
        x = _finite(tl.load(source + page, mask=present & (page < count), other=-float("inf")))
        higher = tl.maximum(highest, tl.max(x, axis=1))
        top = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(highest - top) + tl.sum(tl.exp(x - top[:, None]), axis=1)
        highest = higher
    scale = 1.0 / tl.where(total > 0, total, 1.0)
    for start in range(0, width, const.step):
        page = start + at
        seen = present & (page < count)[None, :]
        x = tl.load(source + page[None, :], mask=seen, other=-float("inf"))
        # Here, for the loop above has no registers left.
        invalid |= tl.max(_is_invalid(x).to(tl.int32), axis=0)
        x = _finite(x)
        found = tl.sum(tl.exp(x - top[:, None]) * scale[:, None], axis=0)
        tl.store(combined + row * width + page, found, mask=page < width)
    if const.counted:
        changed = (tl.max(invalid, axis=0) > 0) & (count > 0)
        # A count, read after the launch: it orders nothing.
        tl.atomic_add(invalid_scores, const.selections, mask=changed, sem="relaxed")
