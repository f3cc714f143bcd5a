"""Scores of sketches in Triton, and the log-sum-exp of tail pages in the same launch."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.kernels.sketch.op import SketchLayout, TailPages
from hisparse.kernels.sketch.triton_parts import find_tail_lse, scale_of, tail_arguments
from hisparse.kernels.triton_common import dot_parts, load_query, num_parts, powers_of_queries

__all__ = ["launch_options", "sketch_score"]

#: The smallest number of queries that a matrix product takes.
_MIN_QUERIES = 8
#: Channels that are decoded once for all tokens of a page; wider keys, in steps, for each token.
_CHANNELS = 128


def sketch_score(
    query: Tensor,
    sketches: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    tail: TailPages | None,
    layout: SketchLayout,
    scale: float,
) -> tuple[Tensor, Tensor | None]:
    """See :func:`hisparse.kernels.sketch_score`; queries of a group share a decoded sketch.

    Decoded keys are numbers of float16, under 2^-4, so that products are exact. A query in float32
    keeps 22 bits, one in 16 bits all of them.
    """
    batch, q_heads, dim = query.shape
    kv_heads, width = sketches.shape[1], host_page_table.shape[1]
    scores = torch.empty(batch, q_heads, width, dtype=torch.float32, device=query.device)
    lse = None if tail is None else scores.new_empty(batch, q_heads)
    if batch * q_heads == 0 or (width == 0 and tail is None):
        return scores, lse
    group = q_heads // kv_heads
    options = launch_options(dim, group)
    blocks = triton.cdiv(group, options["QUERIES"])
    _score_kernel[
        (triton.cdiv(width, options["PAGES"]) + (tail is not None), kv_heads * blocks, batch)
    ](
        (query, *query.stride()),
        (sketches, *sketches.stride()[:2]),
        (host_page_table, *host_page_table.stride()),
        num_pages.contiguous(),
        scores,
        scale,
        width,
        q_heads,
        kv_heads,
        GROUP=group,
        SIZE=layout.page_size,
        DIM=dim,
        COUNT=layout.num_channels,
        BLOCKS=layout.blocks,
        CODE_BYTES=layout.code_bytes,
        LOADED=_loaded(sketches, layout),
        UNIT=math.gcd(16, *sketches.stride()[:2]),
        PARTS=num_parts(query.dtype, torch.float16),
        **tail_arguments(query, tail, lse),
        **options,
    )
    return scores, lse


def launch_options(dim: int, group: int) -> dict[str, int]:
    """Sizes of a program's tiles, warps and stages, chosen so that no kernel spills registers."""
    queries = min(16, max(_MIN_QUERIES, triton.next_power_of_2(group)))
    if dim > _CHANNELS:
        sizes = {"DIM_BLOCK": 64, "QUERIES": queries, "PAGES": 32}
    else:
        sizes = {
            "DIM_BLOCK": max(16, triton.next_power_of_2(dim)),
            "QUERIES": queries,
            "PAGES": 64,
        }
    return sizes | {"num_warps": 8, "num_stages": 1}


def _loaded(sketches: Tensor, layout: SketchLayout) -> int:
    """Bytes of codes in a load: 4 if those of each channel are one word, after its D bytes.

    With more words a program would unroll four bytes in a loop, which takes too many registers.
    """
    if layout.dim > _CHANNELS or layout.code_bytes != 4:
        return 1
    places = (sketches.data_ptr(), *sketches.stride()[:2], layout.dim)
    return 4 if all(x % 4 == 0 for x in places) else 1


@triton.jit
def _detail(
    source,  # [PAGES, 1], the first byte of each sketch
    before,  # [PAGES], detailed channels before ``start``
    start,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCKS: tl.constexpr,
    CODE_BYTES: tl.constexpr,
):
    """Each channel's scale (0: no detail), its codes' place in the sketch, and ``before``."""
    dim = start + tl.arange(0, DIM_BLOCK)
    inside = (dim < DIM)[None, :]
    scales = source + DIM + COUNT * CODE_BYTES + BLOCKS
    bits = tl.load(scales + (dim // 8)[None, :], mask=inside, other=0).to(tl.int32)
    bits = (bits >> (dim % 8)[None, :]) & 1
    # Channels without detail read those of another: so no load waits for a mask.
    place = tl.maximum(before[:, None] + tl.cumsum(bits, axis=1) - 1, 0)
    place = tl.minimum(place, COUNT - 1)
    scale = scale_of(tl.load(scales + BLOCKS + place))
    scale = tl.where(bits > 0, scale * 0.0625, 0.0).to(tl.float16)
    return scale, DIM + place * CODE_BYTES, before + tl.sum(bits, axis=1)


@triton.jit
def _load_codes(source, places, turn, LOADED: tl.constexpr):
    """The codes of 4 * LOADED tokens in each channel, as int32."""
    if LOADED == 4:
        return tl.load((source + places + 4 * turn).to(tl.pointer_type(tl.int32)))
    return tl.load(source + places + turn).to(tl.int32)


@triton.jit
def _keys(codes, scale, token: tl.constexpr):
    """A token's details of keys, times 2 * 4^(token % 4), as float16."""
    # Bits below the 1024 of a float16 are a whole number: of the code, times 2 * 4^(token % 4).
    byte: tl.constexpr = token // 4
    shifted = codes << 1 if byte == 0 else codes >> (8 * byte - 1)
    whole = (shifted.to(tl.int16) & (6 << 2 * (token % 4))) | 0x6400
    return (whole.to(tl.float16, bitcast=True) - (1024.0 + 3 * 4 ** (token % 4))) * scale


@triton.jit
def _base(
    source,  # [PAGES, 1], the first byte of each sketch
    asking,  # see load_query
    up,  # [QUERIES], powers of two for queries
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    DETAIL_BYTES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``[PAGES, QUERIES]``, products with what all tokens of a page share."""
    base = tl.zeros((source.shape[0], up.shape[0]), tl.float32)
    for start in range(0, DIM, DIM_BLOCK):
        dim = start + tl.arange(0, DIM_BLOCK)
        there = (dim < DIM)[None, :]
        whole = tl.load(source + dim[None, :], mask=there, other=0)
        code = tl.load(source + (DIM + DETAIL_BYTES + dim // 8)[None, :], mask=there, other=0)
        # Under 2^-4, so that all keys are within float16.
        key = whole.to(tl.int8, bitcast=True).to(tl.float32) * (scale_of(code) * 0.0625)
        q = load_query(asking, start, DIM, DIM_BLOCK) * up[:, None]
        base = dot_parts(key.to(tl.float16), q, base, tl.float16, PARTS)
    return base


@triton.jit
def _sum_tokens(
    source,  # [PAGES, 1], the first byte of each sketch
    asking,  # see load_query
    up,  # [QUERIES], powers of two for queries
    base,  # [PAGES, QUERIES]
    factor,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCKS: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    LOADED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``[PAGES, QUERIES]``, the log of the sum of e^(q.k) over the tokens of each page."""
    once: tl.constexpr = DIM_BLOCK >= DIM
    none = tl.zeros((source.shape[0],), tl.int32)
    if once:
        q = load_query(asking, 0, DIM, DIM_BLOCK) * up[:, None]
        steps, places, _ = _detail(source, none, 0, DIM, DIM_BLOCK, COUNT, BLOCKS, CODE_BYTES)
    highest = tl.full(base.shape, -float("inf"), tl.float32)
    total = tl.zeros(base.shape, tl.float32)
    # What the loop does not hoist takes no registers for the whole loop.
    for turn in tl.range(CODE_BYTES // LOADED, disable_licm=True):
        if once:
            codes = _load_codes(source, places, turn, LOADED)
        for four in tl.static_range(LOADED):
            logits = ()
            for token in tl.static_range(4 * four, 4 * four + 4):
                product = tl.zeros(base.shape, tl.float32)
                if once:
                    keys = _keys(codes, steps, token)
                    product = dot_parts(keys, q, product, tl.float16, PARTS)
                else:
                    before = none
                    for start in range(0, DIM, DIM_BLOCK):
                        steps, places, before = _detail(
                            source, before, start, DIM, DIM_BLOCK, COUNT, BLOCKS, CODE_BYTES
                        )
                        codes = _load_codes(source, places, turn, LOADED)
                        keys = _keys(codes, steps, token)
                        q = load_query(asking, start, DIM, DIM_BLOCK)
                        q *= up[:, None]
                        product = dot_parts(keys, q, product, tl.float16, PARTS)
                logit = base + product * (factor * (0.5 / 4 ** (token % 4)))
                exists = 4 * LOADED * turn + token < SIZE
                logits += (tl.where(exists, logit, -float("inf")),)  # type: ignore[assignment]
            first, second, third, fourth = logits  # type: ignore[misc]
            higher = tl.maximum(tl.maximum(first, second), tl.maximum(third, fourth))
            higher = tl.maximum(highest, higher)
            total *= tl.exp(highest - higher)
            total += tl.exp(first - higher) + tl.exp(second - higher)
            total += tl.exp(third - higher) + tl.exp(fourth - higher)
            highest = higher
    return highest + tl.log(total)


@triton.jit
def _score_kernel(
    query,  # [B, Hq, D], and its strides
    sketches,  # [host pages, Hkv, bytes], and its strides of pages and heads
    host_page_table,  # [B, P], and its strides
    num_pages,  # [B]
    scores,  # [B, Hq, P]
    scale,
    width,
    q_heads,
    kv_heads,
    tail_keys,  # see find_tail_lse, if TAIL
    tail_scales,  # the same, if TAIL_SCALED
    tails,  # pages and lens [B * rows], lse [B, Hq], rows and heads of a request, if TAIL
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    PAGES: tl.constexpr,
    SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCKS: tl.constexpr,
    CODE_BYTES: tl.constexpr,
    LOADED: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_SIZE: tl.constexpr,
    TAIL_PARTS: tl.constexpr,
    TAIL_SCALED: tl.constexpr,
):
    query_data, query_request, query_head, query_dim = query
    sketch_data, sketch_page, sketch_head = sketches
    table, table_row, table_entry = host_page_table
    blocks: tl.constexpr = (GROUP + QUERIES - 1) // QUERIES
    head = tl.program_id(1) // blocks
    request = tl.program_id(2).to(tl.int64)
    member = tl.program_id(1) % blocks * QUERIES + tl.arange(0, QUERIES)
    asked = member < GROUP
    place = query_data + request * query_request + (head * GROUP + member) * query_head
    asking = (place, query_dim, asked)
    row = request * q_heads + head * GROUP + member
    block = tl.program_id(0)
    if TAIL:
        # The first program, for it waits for three loads one after the other.
        if block == 0:
            tail_pages, tail_lens, tail_lse, tail_rows, tail_heads = tails
            tail_row = request * tail_rows + head * tail_rows // kv_heads
            lse = find_tail_lse(
                asking,
                scale,
                tail_keys,
                tail_scales,
                (tl.load(tail_pages + tail_row).to(tl.int64), head % tail_heads),
                tl.load(tail_lens + tail_row),
                DIM,
                DIM_BLOCK,
                TAIL_SIZE,
                TAIL_PARTS,
                TAIL_SCALED,
            )
            tl.store(tail_lse + row, lse, mask=asked)
            return
        block -= 1
    page = block * PAGES + tl.arange(0, PAGES)
    target = scores + row[None, :] * width + page[:, None]
    inside = asked[None, :] & (page < width)[:, None]
    count = tl.load(num_pages + request)
    if block * PAGES >= count:
        # A captured step has programs for the longest context.
        tl.store(target, tl.full((PAGES, QUERIES), -float("inf"), tl.float32), mask=inside)
        return
    # What is read in place of absent pages is discarded.
    present = page < count
    entry = table + request * table_row + page * table_entry
    host_page = tl.load(entry, mask=present, other=0).to(tl.int64)
    # What a launch finds out about strides is whether 16 divides them, but a sketch's bytes seldom
    # are a multiple of 16.
    offset = tl.multiple_of(host_page * sketch_page + head * sketch_head, UNIT)
    source = (sketch_data + offset)[:, None]
    up, down = powers_of_queries(asking, DIM, DIM_BLOCK)
    base = _base(source, asking, up, DIM, DIM_BLOCK, COUNT * CODE_BYTES, PARTS)
    factor = (down * 16.0 * scale)[None, :]
    base *= factor
    if COUNT == 0:
        score = base + tl.log(tl.full((1, 1), SIZE, tl.float32))
    else:
        score = _sum_tokens(
            source,
            asking,
            up,
            base,
            factor,
            SIZE,
            DIM,
            DIM_BLOCK,
            COUNT,
            BLOCKS,
            CODE_BYTES,
            LOADED,
            PARTS,
        )
    score = tl.where(present[:, None], score, -float("inf"))
    tl.store(target, score, mask=inside)
