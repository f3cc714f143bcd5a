"""Scores of tokens by a model's own indexer, and its stored keys, in Triton."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.kernels.quantize.triton import to_e4m3
from hisparse.kernels.triton_common import (
    INTERPRETED,
    dot_block,
    dot_parts,
    existing,
    from_e4m3,
    num_parts,
    power_of,
    programs_of,
    reads_e4m3,
    require_dense_rows,
    rounded,
)
from hisparse.types import IndexerInputs


class _ScoreConstants(NamedTuple):
    """What the kernel that scores is compiled for."""

    heads: int  # Hi, of the indexer
    heads_block: int  # the same, rounded up to a power of two
    dim: int  # Di, width of a key
    dim_block: int  # the same, rounded up to a power of two
    tokens: int  # that a program scores in a turn
    parts: int  # numbers that a query's number is split into, see :func:`num_parts`
    fp8: bool  # whether stored keys are float8_e4m3fn
    as_bytes: bool  # whether these are converted in registers


class _StoreConstants(NamedTuple):
    """What the kernel that stores keys is compiled for."""

    dim: int  # Di, width of a key
    dim_block: int  # the same, rounded up to a power of two
    fp8: bool  # whether stored keys are float8_e4m3fn


def index_score(
    new: IndexerInputs,
    keys: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    scales: Tensor | None,
) -> Tensor:
    """See :func:`hisparse.kernels.index_score`; a program scores 32 or 64 tokens in a turn."""
    (batch, heads, dim), width = new.queries.shape, host_page_table.shape[1]
    scores = torch.empty(batch, 1, width, dtype=torch.float32, device=keys.device)
    if scores.numel() == 0:
        return scores
    require_dense_rows(keys=keys)
    fp8 = keys.dtype == torch.float8_e4m3fn
    as_bytes = fp8 and not reads_e4m3(keys.device)
    narrow = torch.float16 if fp8 else keys.dtype
    tokens, num_warps = _tokens_and_warps(keys.dtype, as_bytes)
    programs = programs_of(keys.device, triton.cdiv(width, tokens), batch, 1)
    _score_kernel[(programs, batch)](
        (new.queries, *new.queries.stride()),
        (new.keys, *new.keys.stride()),
        (new.weights, *new.weights.stride()),
        (
            keys.view(torch.uint8) if as_bytes else keys,
            keys.stride(0),
            # Not read where there are no scales.
            new.weights if scales is None else scales.contiguous(),
        ),
        (host_page_table, *host_page_table.stride(), num_pages.contiguous()),
        scores,
        (width, keys.shape[0]),
        _ScoreConstants(
            heads=heads,
            heads_block=dot_block(heads),
            dim=dim,
            dim_block=dot_block(dim),
            tokens=tokens,
            parts=num_parts(new.queries.dtype, narrow),
            fp8=fp8,
            as_bytes=as_bytes,
        ),
        num_warps=num_warps,
    )
    return scores


def chunk_index_score(
    new: IndexerInputs,
    keys: Tensor,
    host_page_table: Tensor,
    num_tokens: Tensor,
    scales: Tensor | None,
) -> Tensor:
    """See :func:`hisparse.kernels.chunk_index_score`; as if each token were a request's new one."""
    table = host_page_table.expand(len(num_tokens), -1)
    return index_score(new, keys, table, num_tokens, scales)


def _tokens_and_warps(dtype: torch.dtype, as_bytes: bool) -> tuple[int, int]:
    """Tokens of a program and its warps, chosen so that no kernel spills registers.

    Args:
        dtype: of the stored keys.
        as_bytes: whether keys in eight bits are converted in registers.
    """
    if dtype == torch.float8_e4m3fn:
        return 32 if as_bytes else 64, 4
    return 32 if dtype == torch.float32 else 64, 8


def store_index_keys(new: Tensor, keys: Tensor, host_pages: Tensor, scales: Tensor | None) -> None:
    """See :func:`hisparse.kernels.store_index_keys`; one program per token."""
    tokens, dim = new.shape
    if tokens == 0:
        return
    _store_kernel[(tokens,)](
        (new, *new.stride()),
        (keys if scales is None else keys.view(torch.uint8), keys.stride(0)),
        # Not written to where there are no scales.
        new if scales is None else scales,
        host_pages.contiguous(),
        keys.shape[0],
        _StoreConstants(
            dim=dim, dim_block=max(32, triton.next_power_of_2(dim)), fp8=scales is not None
        ),
        num_warps=1,
    )


@triton.jit
def _score_kernel(
    queries,  # [B, Hi, Di], and its strides
    new_keys,  # [B, Di], and its strides
    weights,  # [B, Hi], and its strides
    keys,  # [host pages, Di], and its stride of pages; scales [host pages], if there are any
    host_pages,  # [B, P], and its strides; tokens of each request [B]
    scores,  # [B, 1, P]
    shape,  # P, host pages
    const: tl.constexpr,
):
    query_data, query_token, query_head, query_dim = queries
    weight_data, weight_token, weight_head = weights
    key_data, key_page, scales = keys
    table, stride_table, stride_entry, num_pages = host_pages
    width, num_keys = shape
    TOKENS: tl.constexpr = const.tokens
    request = tl.program_id(1).to(tl.int64)
    count = tl.minimum(tl.load(num_pages + request), width)
    tiles, programs = tl.cdiv(count, TOKENS), tl.num_programs(0)
    # The program with the fewest tiles scores the new token, whose key is not stored yet.
    adds = (tl.program_id(0) == programs - 1) & (count < width)
    if (tl.program_id(0) >= tiles) & (not adds):
        return
    head, dim = tl.arange(0, const.heads_block), tl.arange(0, const.dim_block)
    there = (head < const.heads)[:, None] & (dim < const.dim)[None, :]
    place = query_data + request * query_token + head[:, None] * query_head
    q = tl.load(place + dim[None, :] * query_dim, mask=there, other=0.0).to(tl.float32)
    place = weight_data + request * weight_token + head * weight_head
    weight = tl.load(place, mask=head < const.heads, other=0.0).to(tl.float32)
    if adds:
        new_data, new_token, new_dim = new_keys
        source = new_data + request * new_token + dim * new_dim
        new = tl.load(source, mask=dim < const.dim, other=0.0).to(tl.float32)
        product = tl.sum(q * new[None, :], axis=1)
        own = tl.sum(tl.where(product < 0, 0.0, product) * weight, axis=0)
        tl.store(scores + request * width + count, own)
    for tile in tl.range(tl.program_id(0), tiles, programs, num_stages=1):
        page = tile * TOKENS + tl.arange(0, TOKENS)
        entry = table + request * stride_table + page * stride_entry
        # What is read in place of absent keys is discarded.
        host_page = existing(tl.load(entry, mask=page < count, other=0), num_keys).to(tl.int64)
        found = _products(q, weight, key_data + host_page * key_page, const)
        if const.fp8:
            found *= tl.load(scales + host_page)
        tl.store(scores + request * width + page, found, mask=page < count)


@triton.jit
def _products(q, weight, rows, const: tl.constexpr):
    """Scores by the stored keys that begin at ``rows``, ``[tokens]``, without their scales."""
    kind: tl.constexpr = tl.float16 if const.fp8 else rows.dtype.element_ty
    wide: tl.constexpr = tl.float32 if INTERPRETED and kind == tl.bfloat16 else kind
    dim = tl.arange(0, const.dim_block)
    k = tl.load(rows[:, None] + dim[None, :], mask=(dim < const.dim)[None, :], other=0.0)
    k = (from_e4m3(k) if const.as_bytes else k).to(wide)
    products = tl.zeros((rows.shape[0], weight.shape[0]), tl.float32)
    factor = weight
    if const.fp8:
        up, down = power_of(tl.max(tl.abs(q), axis=1))
        q *= up[:, None]
        # The 2^8 are those that from_e4m3 leaves out.
        factor = weight * down * (256.0 if const.as_bytes else 1.0)
    products = dot_parts(k, q, products, kind, const.parts)
    # Not tl.maximum, which would drop NaN.
    products = tl.where(products < 0, 0.0, products)
    return tl.sum(products * factor[None, :], axis=1)


@triton.jit
def _store_kernel(
    new,  # [T, Di], and its strides
    keys,  # [host pages, Di], and its stride of pages
    scales,  # [host pages], if there are any
    host_pages,  # [T]
    num_host_pages,
    const: tl.constexpr,
):
    new_data, new_token, new_dim = new
    key_data, key_page = keys
    token, dim = tl.program_id(0).to(tl.int64), tl.arange(0, const.dim_block)
    target = tl.load(host_pages + token).to(tl.int64)
    if target <= 0 or target >= num_host_pages:
        return
    there = dim < const.dim
    source = new_data + token * new_token + dim * new_dim
    x = tl.load(source, mask=there, other=0.0).to(tl.float32)
    out = key_data + target * key_page + dim
    if const.fp8:
        # See index/reference.py.
        largest = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-4)
        exponent = ((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        tl.store(out, to_e4m3(x * inverse), mask=there)
        tl.store(scales + target, (exponent << 23).to(tl.float32, bitcast=True))
    else:
        tl.store(out, rounded(x, key_data.dtype.element_ty), mask=there)
