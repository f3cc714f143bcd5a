"""Attention by the CPU as CUDA calls it: from a thread that knows no Python."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels import HostAttentionCall, paged_attention, quantize, raise_host_error
from hisparse.types import AttentionRule, StoredKV
from tests.kernels.world import i32

PAGES, KV_HEADS, SIZE, DIM, QUERIES = 30, 2, 4, 40, 4
RULE = AttentionRule(0.3, 5.0)
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
EIGHT_BITS = [torch.float8_e4m3fn, torch.int8]


def stored(dtype: torch.dtype) -> StoredKV:
    k, v = torch.randn(2, PAGES, KV_HEADS, SIZE, DIM)
    if dtype in EIGHT_BITS:
        return quantize(k, v, dtype)
    return StoredKV(k.to(dtype), v.to(dtype), None)


def call_by_a_thread(call: HostAttentionCall) -> None:
    """The GIL is held meanwhile: whoever takes it waits forever."""
    libc, thread = ctypes.PyDLL(None), ctypes.c_ulong()
    function, argument = ctypes.c_void_p(call._function), ctypes.c_void_p(call._call)
    assert libc.pthread_create(ctypes.byref(thread), None, function, argument) == 0
    assert libc.pthread_join(thread, None) == 0


def made(
    query: Tensor, kv: StoredKV, table: Tensor, heads: int
) -> tuple[HostAttentionCall, Tensor, Tensor]:
    out = torch.full((*query.shape[:2], DIM), torch.nan)
    lse = torch.full(query.shape[:2], torch.nan)
    return HostAttentionCall(query, kv, table, out, lse, rule=RULE, heads=heads), out, lse


@pytest.mark.parametrize("heads", [1, KV_HEADS], ids=["whole-pages", "a-head-a-row"])
@pytest.mark.parametrize("dtype", [*FLOATS, *EIGHT_BITS], ids=str)
def test_it_is_attention_over_the_pages_before_the_first_gap(
    dtype: torch.dtype, heads: int
) -> None:
    torch.manual_seed(0)
    kv = stored(dtype)
    query = torch.randn(6, QUERIES, DIM).to(torch.float32 if dtype in EIGHT_BITS else dtype)
    table = i32([[-1] * 5] * 6)
    call, out, lse = made(query, kv, table, heads)
    for lengths in ([5, 0, 1, 3, 5, 2], [0] * 6):  # What is read may change between calls.
        query.copy_(torch.randn(query.shape))
        table.fill_(-1)
        for row, length in enumerate(lengths):
            table[row, :length] = torch.randperm(PAGES)[:length]
        call_by_a_thread(call)
        lens = SIZE * i32(lengths)
        expected = paged_attention(query, kv, table, lens, rule=RULE, heads=heads, impl="cpu")
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
    raise_host_error()


def test_an_error_is_kept_for_whoever_asks() -> None:
    table = i32([[3, 7], [1, PAGES]])
    call, out, lse = made(torch.randn(2, QUERIES, DIM), stored(torch.float32), table, 1)
    call_by_a_thread(call)
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()
    table[1, 1] = PAGES + 1  # The first one is kept.
    call_by_a_thread(call)
    with pytest.raises(KernelError, match="host memory: page_table: got 30 in row 1, entry 1, exp"):
        raise_host_error()
    raise_host_error()
    table[1, 1] = 2
    call_by_a_thread(call)
    assert lse.isfinite().all()


def test_tensors_are_checked_when_it_is_made() -> None:
    with pytest.raises(KernelError, match="page_table: got"):
        made(torch.randn(2, QUERIES, DIM), stored(torch.float32), i32([[1]]).long(), 1)
