"""Parts of kernels that score sketches: scales, and the log-sum-exp of tail pages."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.kernels.sketch.op import SCALE_OFFSET, TailPages
from hisparse.kernels.triton_common import (
    INTERPRETED,
    dot_parts,
    from_e4m3,
    load_query,
    num_parts,
    powers_of_queries,
)

__all__ = ["find_tail_lse", "scale_of", "tail_arguments"]

_OFFSET = tl.constexpr(SCALE_OFFSET)
#: The smallest number of rows of a matrix product.
_MIN_DOT = 16


def tail_arguments(query: Tensor, tail: TailPages | None, lse: Tensor | None) -> dict[str, Any]:
    """Arguments of a kernel that calls :func:`find_tail_lse`; without ``tail`` none is read."""
    if tail is None or lse is None:
        nothing = (query, 0, 0, 0)
        return {
            "tail_keys": nothing,
            "tail_scales": nothing,
            "tails": (query, query, query, 0, 0),
            "TAIL": False,
            "TAIL_SIZE": 16,
            "TAIL_PARTS": 1,
            "TAIL_SCALED": False,
        }
    k, scales = tail.kv.k, tail.kv.scales
    narrow = torch.float16 if scales is not None else k.dtype
    # As bytes, because some GPUs that Triton compiles for do not have this format.
    keys = k.view(torch.uint8) if k.dtype == torch.float8_e4m3fn else k
    pages, lens = tail.pages.contiguous(), tail.lens.contiguous()
    return {
        "tail_keys": (keys, *k.stride()[:3]),
        "tail_scales": (query, 0, 0, 0) if scales is None else (scales, *scales.stride()[:3]),
        "tails": (pages, lens, lse, len(tail.pages) // len(query), k.shape[1]),
        "TAIL": True,
        "TAIL_SIZE": max(_MIN_DOT, triton.next_power_of_2(k.shape[2])),
        "TAIL_PARTS": num_parts(query.dtype, narrow),
        "TAIL_SCALED": scales is not None,
    }


@triton.jit
def scale_of(code):
    """The scale of a code, as float32."""
    return ((code.to(tl.int32) + _OFFSET) << 20).to(tl.float32, bitcast=True)


@triton.jit
def find_tail_lse(
    asking,  # see load_query
    scale,
    keys,  # [N, heads, S, D], and its strides of pages, heads and tokens
    scales,  # [N, heads, S, 2], and its strides, if SCALED
    where,  # page and head
    length,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """``[QUERIES]``, the log of the sum of e^(q.k) over the first ``length`` tokens of a page."""
    pages, key_page, key_head, key_token = keys
    page, head = where
    kind: tl.constexpr = tl.float16 if SCALED else pages.dtype.element_ty
    wide: tl.constexpr = tl.float32 if INTERPRETED and kind == tl.bfloat16 else kind
    token = tl.arange(0, SIZE)
    live = token < length
    place = pages + page * key_page + head * key_head + token * key_token
    up, down = powers_of_queries(asking, DIM, DIM_BLOCK)
    logits = tl.zeros((SIZE, up.shape[0]), tl.float32)
    for start in range(0, DIM, DIM_BLOCK):
        dim = start + tl.arange(0, DIM_BLOCK)
        q = load_query(asking, start, DIM, DIM_BLOCK) * up[:, None]
        seen = live[:, None] & (dim < DIM)[None, :]
        k = tl.load(place[:, None] + dim[None, :], mask=seen, other=0.0)
        k = (from_e4m3(k) if k.dtype == tl.uint8 else k).to(wide)
        logits = dot_parts(k, q, logits, kind, PARTS)
    logits *= (down * scale)[None, :]
    if SCALED:
        exponents, scale_page, scale_head, scale_token = scales
        place = exponents + page * scale_page + head * scale_head + token * scale_token
        exponent = tl.load(place, mask=live, other=0).to(tl.int32)
        if pages.dtype.element_ty == tl.uint8:
            exponent += 8  # from_e4m3 leaves out 2^8.
        logits *= (exponent << 23).to(tl.float32, bitcast=True)[:, None]
    logits = tl.where(live[:, None], logits, -float("inf"))
    highest = tl.max(logits, axis=0)
    shift = tl.where(highest == -float("inf"), 0.0, highest)
    total = tl.sum(tl.exp(logits - shift[None, :]), axis=0)
    # Not -inf of a logarithm of 0, at which the interpreter warns.
    return tl.where(total > 0, shift + tl.log(tl.where(total > 0, total, 1.0)), -float("inf"))
