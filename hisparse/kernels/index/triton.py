"""Scores of tokens by a model's own indexer, and its stored keys, in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hisparse.kernels.quantize.triton import to_e4m3
from hisparse.kernels.triton_common import (
    INTERPRETED,
    dot_parts,
    from_e4m3,
    num_parts,
    power_of,
    reads_e4m3,
    rounded,
)
from hisparse.types import IndexerInputs

__all__ = ["chunk_index_score", "index_score", "launch_options", "store_index_keys"]

_MIN_DOT = 16


def index_score(
    new: IndexerInputs,
    keys: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    scales: Tensor | None,
) -> Tensor:
    """See :func:`hisparse.kernels.index_score`; a program scores 32 or 64 tokens of a request."""
    (batch, heads, dim), width = new.queries.shape, host_page_table.shape[1]
    scores = torch.empty(batch, 1, width, dtype=torch.float32, device=keys.device)
    if scores.numel() == 0:
        return scores
    fp8 = keys.dtype == torch.float8_e4m3fn
    as_bytes = fp8 and not reads_e4m3(keys.device)
    narrow = torch.float16 if fp8 else keys.dtype
    options = launch_options(keys.dtype, as_bytes)
    _score_kernel[(triton.cdiv(width, options["TOKENS"]), batch)](
        (new.queries, *new.queries.stride()),
        (new.keys, *new.keys.stride()),
        (new.weights, *new.weights.stride()),
        (keys.view(torch.uint8) if as_bytes else keys, keys.stride(0)),
        # Not read where there are no scales.
        new.weights if scales is None else scales,
        (host_page_table, *host_page_table.stride()),
        num_pages.contiguous(),
        scores,
        width,
        HEADS=heads,
        HEADS_BLOCK=max(_MIN_DOT, triton.next_power_of_2(heads)),
        DIM=dim,
        DIM_BLOCK=max(_MIN_DOT, triton.next_power_of_2(dim)),
        PARTS=num_parts(new.queries.dtype, narrow),
        FP8=fp8,
        BYTES=as_bytes,
        **options,
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


def launch_options(dtype: torch.dtype, as_bytes: bool) -> dict[str, int]:
    """Tokens of a program and its warps, chosen so that no kernel spills registers.

    Args:
        dtype: of the stored keys.
        as_bytes: whether keys in eight bits are converted in registers.
    """
    if dtype == torch.float8_e4m3fn:
        return {"TOKENS": 32 if as_bytes else 64, "num_warps": 4}
    return {"TOKENS": 32 if dtype == torch.float32 else 64, "num_warps": 8}


def store_index_keys(new: Tensor, keys: Tensor, host_pages: Tensor, scales: Tensor | None) -> None:
    """See :func:`hisparse.kernels.store_index_keys`; one program per token."""
    tokens, dim = new.shape
    if tokens == 0:
        return
    _store_kernel[(tokens,)](
        new,
        keys if scales is None else keys.view(torch.uint8),
        # Not written to where there are no scales.
        new if scales is None else scales,
        host_pages.contiguous(),
        *new.stride(),
        keys.stride(0),
        keys.shape[0],
        DIM=dim,
        DIM_BLOCK=max(32, triton.next_power_of_2(dim)),
        FP8=scales is not None,
        num_warps=1,
    )


@triton.jit
def _score_kernel(
    queries,  # [B, HEADS, DIM], and its strides
    new_keys,  # [B, DIM], and its strides
    weights,  # [B, HEADS], and its strides
    keys,  # [host pages, DIM], and its stride of pages
    scales,  # [host pages], if FP8
    host_page_table,  # [B, P], and its strides
    num_pages,  # [B]
    scores,  # [B, 1, P]
    width,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    FP8: tl.constexpr,
    BYTES: tl.constexpr,
):
    query_data, query_token, query_head, query_dim = queries
    new_data, new_token, new_dim = new_keys
    weight_data, weight_token, weight_head = weights
    key_data, key_page = keys
    table, stride_table, stride_entry = host_page_table
    block, request = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kind: tl.constexpr = tl.float16 if FP8 else key_data.dtype.element_ty
    wide: tl.constexpr = tl.float32 if INTERPRETED and kind == tl.bfloat16 else kind
    page = block * TOKENS + tl.arange(0, TOKENS)
    target = scores + request * width + page
    count = tl.load(num_pages + request)
    # A captured step has programs for the longest context.
    if block * TOKENS > count:
        return
    head, dim = tl.arange(0, HEADS_BLOCK), tl.arange(0, DIM_BLOCK)
    there = (head < HEADS)[:, None] & (dim < DIM)[None, :]
    place = query_data + request * query_token + head[:, None] * query_head
    q = tl.load(place + dim[None, :] * query_dim, mask=there, other=0.0).to(tl.float32)
    place = weight_data + request * weight_token + head * weight_head
    weight = tl.load(place, mask=head < HEADS, other=0.0).to(tl.float32)
    # Stored keys; what is read in place of absent ones is discarded.
    entry = table + request * stride_table + page * stride_entry
    host_page = tl.load(entry, mask=page < count, other=0).to(tl.int64)
    place = key_data + host_page[:, None] * key_page + dim[None, :]
    k = tl.load(place, mask=(dim < DIM)[None, :], other=0.0)
    k = (from_e4m3(k) if BYTES else k).to(wide)
    products = tl.zeros((TOKENS, HEADS_BLOCK), tl.float32)
    if FP8:
        up, down = power_of(tl.max(tl.abs(q), axis=1), 14)
        products = dot_parts(k, q * up[:, None], products, kind, PARTS)
        # The 2^8 are those that from_e4m3 leaves out.
        factor = weight * down * (256.0 if BYTES else 1.0)
    else:
        products = dot_parts(k, q, products, kind, PARTS)
        factor = weight
    # Not tl.maximum, which would drop NaN.
    products = tl.where(products < 0, 0.0, products)
    found = tl.sum(products * factor[None, :], axis=1)
    if FP8:
        found *= tl.load(scales + host_page)
    if block * TOKENS + TOKENS > count:
        # The new token, whose key is not stored yet.
        source = new_data + request * new_token + dim * new_dim
        new = tl.load(source, mask=dim < DIM, other=0.0).to(tl.float32)
        product = tl.sum(q * new[None, :], axis=1)
        own = tl.sum(tl.where(product < 0, 0.0, product) * weight, axis=0)
        found = tl.where(page == count, own, found)
    tl.store(target, found, mask=(page <= count) & (page < width))


@triton.jit
def _store_kernel(
    new,  # [T, DIM]
    keys,  # [host pages, DIM]
    scales,  # [host pages], if FP8
    host_pages,  # [T]
    new_token,
    new_dim,
    key_page,
    num_host_pages,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    FP8: tl.constexpr,
):
    token, dim = tl.program_id(0).to(tl.int64), tl.arange(0, DIM_BLOCK)
    target = tl.load(host_pages + token).to(tl.int64)
    if target <= 0 or target >= num_host_pages:
        return
    source = new + token * new_token + dim * new_dim
    x = tl.load(source, mask=dim < DIM, other=0.0).to(tl.float32)
    out = keys + target * key_page + dim
    if FP8:
        # See index/reference.py.
        largest = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-4)
        exponent = ((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        tl.store(out, to_e4m3(x * inverse), mask=dim < DIM)
        tl.store(scales + target, (exponent << 23).to(tl.float32, bitcast=True))
    else:
        tl.store(out, rounded(x, keys.dtype.element_ty), mask=dim < DIM)
