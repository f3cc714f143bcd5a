"""Summarising, scoring and choosing pages in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.kernels.reference.select import best_pages
from hisparse.kernels.select_rule import SelectRule

__all__ = ["page_score", "page_summary", "select"]

#: Values of a tile; with more than 64 a thread of each kind, registers spill.
_TILE = 8192
_MOST_PAGES = 16
_SCORES_PER_STEP = 1024


def page_summary(keys: Tensor, summaries: Tensor, host_pages: Tensor) -> None:
    """See :func:`hisparse.kernels.page_summary`; one program per page, head and block of D."""
    pages, size, heads, dim = keys.shape
    if pages == 0:
        return
    size_block = triton.next_power_of_2(size)
    dim_block = min(triton.next_power_of_2(dim), max(16, _TILE // size_block))
    _summary_kernel[(pages, heads, triton.cdiv(dim, dim_block))](
        keys,
        summaries,
        host_pages,
        *keys.stride(),
        *summaries.stride()[:2],
        summaries.shape[0],
        SIZE=size,
        SIZE_BLOCK=size_block,
        DIM=dim,
        DIM_BLOCK=dim_block,
        NARROW=summaries.dtype == torch.bfloat16,
    )


def page_score(
    query: Tensor,
    summaries: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    scales: Tensor | None,
) -> Tensor:
    """See :func:`hisparse.kernels.page_score`; the heads of a group share a loaded summary."""
    batch, q_heads, dim = query.shape
    (ranges, kv_heads), width = summaries.shape[1:3], host_page_table.shape[1]
    scores = query.new_empty(batch, q_heads, width)
    if scores.numel() == 0:
        return scores
    dim_block = triton.next_power_of_2(dim)
    pages = max(1, min(_MOST_PAGES, _TILE // 2 // dim_block))
    grid = (triton.cdiv(width, pages), kv_heads, batch)
    _score_kernel[grid](
        query.contiguous(),
        summaries,
        host_page_table,
        num_pages,
        scores,
        # Not read where there are no scales.
        query if scales is None else scales.contiguous(),
        width,
        *summaries.stride()[:3],
        *host_page_table.stride(),
        q_heads,
        kv_heads,
        GROUP=q_heads // kv_heads,
        GROUP_BLOCK=triton.next_power_of_2(q_heads // kv_heads),
        RANGES=ranges,
        DIM=dim,
        DIM_BLOCK=dim_block,
        PAGES=pages,
        SCALED=scales is not None,
    )
    return scores


def select(
    scores: Tensor,
    num_pages: Tensor,
    forced: Tensor | None,
    rest: Tensor | None,
    rule: SelectRule,
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.select`; heads agree in Triton, PyTorch chooses."""
    scores = scores.float()
    batch, given, width = scores.shape
    near = rule.within is not None
    counter = rule.invalid_scores
    if given <= rule.heads and not near and rule.mass is None:
        if counter is not None and scores.numel():
            _count_kernel[(given, batch)](
                scores.contiguous(),
                num_pages,
                counter,
                width,
                given,
                MAX_PAGES=rule.max_pages,
                SELECTIONS=rule.heads // given,
                STEP=_SCORES_PER_STEP,
            )
        combined = scores.repeat_interleave(rule.heads // given, dim=1)
        return best_pages(combined, num_pages, forced, rule, given)
    heads = min(given, rule.heads)
    combined = scores.new_empty(batch, heads, width)
    group_block = triton.next_power_of_2(given // heads)
    if combined.numel():
        _share_kernel[(heads, batch)](
            scores.contiguous(),
            scores.new_full((batch, given), -torch.inf) if rest is None else rest.contiguous(),
            num_pages,
            combined,
            # Not written to where there is no counter.
            num_pages if counter is None else counter,
            width,
            heads,
            COUNTED=counter is not None,
            # A selection of fixed length has all pages of a request that has no more than that.
            MAX_PAGES=rule.max_pages if rule.mass is None and not near else 0,
            SELECTIONS=rule.heads // heads,
            NEAR=near,
            GROUP=given // heads,
            GROUP_BLOCK=group_block,
            STEP=max(16, _SCORES_PER_STEP // group_block),
        )
    combined = combined.repeat_interleave(rule.heads // heads, dim=1)
    return best_pages(combined, num_pages, forced, rule, given)


@triton.jit
def _outward(x, NARROW: tl.constexpr, UP: tl.constexpr):
    """Convert to float32, or to bfloat16 that is never below ``x`` if UP, else never above it."""
    if NARROW:
        # The upper half of a float32 is a bfloat16, rounded towards zero.
        bits = x.to(tl.int32, bitcast=True)
        away = ((bits & 0xFFFF) != 0) & ((x > 0) if UP else (x < 0))
        half = (bits >> 16) + away.to(tl.int32)
        rounded = half.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = x
    return rounded


@triton.jit
def _summary_kernel(
    keys,  # [P, S, Hkv, D]
    summaries,  # [host pages, Hkv, 2D]
    host_pages,  # [P]
    stride_page,
    stride_token,
    stride_head,
    stride_dim,
    stride_out_page,
    stride_out_head,
    num_host_pages,
    SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    NARROW: tl.constexpr,
):
    page, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    target = tl.load(host_pages + page).to(tl.int64)
    if target < 0 or target >= num_host_pages:
        return
    token = tl.arange(0, SIZE_BLOCK)[:, None]
    dim = tl.program_id(2) * DIM_BLOCK + tl.arange(0, DIM_BLOCK)
    source = keys + page * stride_page + head * stride_head
    source += token * stride_token + dim[None, :] * stride_dim
    there = (token < SIZE) & (dim[None, :] < DIM)
    x = tl.load(source, mask=there, other=0.0).to(tl.float32)
    high = tl.max(tl.where(token < SIZE, x, -float("inf")), axis=0)
    low = tl.min(tl.where(token < SIZE, x, float("inf")), axis=0)
    out = summaries + target * stride_out_page + head * stride_out_head + dim
    tl.store(out, _outward(high, NARROW, True), mask=dim < DIM)
    tl.store(out + DIM, _outward(low, NARROW, False), mask=dim < DIM)


@triton.jit
def _score_kernel(
    query,  # [B, Hq, D]
    summaries,  # [host pages, RANGES, Hkv, 2D]
    host_page_table,  # [B, P]
    num_pages,  # [B]
    scores,  # [B, Hq, P]
    scales,  # [host pages, RANGES, Hkv], if SCALED
    width,
    stride_page,
    stride_range,
    stride_head,
    stride_table,
    stride_entry,
    q_heads,
    kv_heads,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    RANGES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    PAGES: tl.constexpr,
    SCALED: tl.constexpr,
):
    head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    dim = tl.arange(0, DIM_BLOCK)
    present = page < tl.load(num_pages + request)
    entry = host_page_table + request * stride_table + page * stride_entry
    host_page = tl.load(entry, mask=present, other=0).to(tl.int64)
    there = present[:, None] & (dim[None, :] < DIM)
    source = summaries + host_page[:, None] * stride_page + head * stride_head + dim[None, :]
    first = request * q_heads + head * GROUP
    member = tl.arange(0, GROUP_BLOCK)[:, None]
    best = tl.full((GROUP_BLOCK, PAGES), -float("inf"), tl.float32)
    for part in range(RANGES):
        high = tl.load(source + part * stride_range, mask=there, other=0.0).to(tl.float32)
        low = tl.load(source + part * stride_range + DIM, mask=there, other=0.0).to(tl.float32)
        scale = tl.full((PAGES,), 1.0, tl.float32)
        if SCALED:
            factor = (host_page * RANGES + part) * kv_heads + head
            scale = tl.load(scales + factor, mask=present, other=0.0)
        for g in range(GROUP):
            q = tl.load(query + (first + g) * DIM + dim, mask=dim < DIM, other=0.0)
            above, below = tl.maximum(q, 0.0), tl.minimum(q, 0.0)
            bound = scale * tl.sum(high * above[None, :] + low * below[None, :], axis=1)
            best = tl.where(member == g, tl.maximum(best, bound[None, :]), best)
    best = tl.where(present[None, :], best, -float("inf"))
    out = scores + (first + member) * width + page[None, :]
    tl.store(out, best, mask=(member < GROUP) & (page < width)[None, :])


@triton.jit
def _finite(x):
    """NaN as -inf, and inf as the largest float32, so that a difference of scores is no NaN."""
    return tl.where(x == x, tl.minimum(x, 3.4028234663852886e38), -float("inf"))


@triton.jit
def _is_invalid(x):
    """NaN or +inf."""
    return (x <= 3.4028234663852886e38) == 0


@triton.jit
def _count_kernel(
    scores,  # [B, H, P]
    num_pages,  # [B]
    invalid_scores,  # [1]
    width,
    heads,
    MAX_PAGES: tl.constexpr,
    SELECTIONS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Add SELECTIONS if a score of a head is NaN or +inf and its request has a choice of pages."""
    head, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count = tl.load(num_pages + request)
    if count <= MAX_PAGES:
        return
    at = tl.arange(0, STEP)
    source = scores + (request * heads + head) * width
    invalid = tl.zeros((STEP,), tl.int32)
    for start in range(0, width, STEP):
        x = tl.load(source + start + at, mask=start + at < count, other=0.0)
        invalid |= _is_invalid(x).to(tl.int32)
    tl.atomic_add(invalid_scores, SELECTIONS, mask=tl.max(invalid, axis=0) > 0)


@triton.jit
def _share_kernel(
    scores,  # [B, H * GROUP, P]
    rest,  # [B, H * GROUP]
    num_pages,  # [B]
    combined,  # [B, H, P]
    invalid_scores,  # [1], if COUNTED
    width,
    heads,
    COUNTED: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    SELECTIONS: tl.constexpr,
    NEAR: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Combine a group's heads into one score per page.

    If NEAR, the largest over heads of a page's score minus the head's best score; else the sum over
    heads of each head's softmax over the pages and the rest.
    """
    head, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count = tl.load(num_pages + request)
    row = request * heads + head
    member, at = tl.arange(0, GROUP_BLOCK), tl.arange(0, STEP)
    source = scores + (row * GROUP + member[:, None]) * width
    present = (member < GROUP)[:, None]
    beside = tl.load(rest + row * GROUP + member, mask=member < GROUP, other=-float("inf"))
    invalid = tl.zeros((STEP,), tl.int32) + tl.max(_is_invalid(beside).to(tl.int32), axis=0)
    highest = _finite(beside)
    total = tl.where(highest == -float("inf"), 0.0, 1.0)
    # -inf everywhere: there is no maximum to subtract.
    top = tl.where(highest == -float("inf"), 0.0, highest)
    for start in range(0, width, STEP):
        page = start + at[None, :]
        x = _finite(tl.load(source + page, mask=present & (page < count), other=-float("inf")))
        higher = tl.maximum(highest, tl.max(x, axis=1))
        top = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(highest - top) + tl.sum(tl.exp(x - top[:, None]), axis=1)
        highest = higher
    scale = 1.0 / tl.where(total > 0, total, 1.0)
    for start in range(0, width, STEP):
        page = start + at
        seen = present & (page < count)[None, :]
        x = tl.load(source + page[None, :], mask=seen, other=-float("inf"))
        # Here, for the loop above has no registers left.
        invalid |= tl.max(_is_invalid(x).to(tl.int32), axis=0)
        x = _finite(x)
        if NEAR:
            found = tl.max(x - top[:, None], axis=0)
        else:
            found = tl.sum(tl.exp(x - top[:, None]) * scale[:, None], axis=0)
        tl.store(combined + row * width + page, found, mask=page < width)
    if COUNTED:
        changed = (tl.max(invalid, axis=0) > 0) & (count > MAX_PAGES)
        tl.atomic_add(invalid_scores, SELECTIONS, mask=changed)
