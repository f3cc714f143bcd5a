"""``paged_attention`` of every implementation against float64."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from hisparse.errors import KernelError
from hisparse.kernels import paged_attention
from hisparse.types import AttentionRule, PagedKV


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("lens", "queries", "heads", "size", "dims"),
    [
        pytest.param([0, 1, 100, 128], 3, 1, 16, (64, 64), id="per-head"),
        pytest.param([40, 7, 33], 8, 2, 8, (24, 40), id="all-heads-odd-widths"),
        pytest.param([5000, 4097, 2048], 4, 1, 16, (16, 16), id="split"),
        pytest.param([63], 1, 1, 1, (5, 3), id="token-pages"),
        pytest.param([129, 300], 4, 1, 16, (128, 128), id="wide"),
    ],
)
def test_attends_exactly_the_tokens_of_a_row(
    impl: str,
    dtype: torch.dtype,
    lens: list[int],
    queries: int,
    heads: int,
    size: int,
    dims: tuple[int, int],
) -> None:
    """Everything that is not to be read is NaN."""
    width = max(-(-n // size) for n in lens) + 2
    total = len(lens) * width + 1
    # As the device buffer lies in memory: a token's heads side by side.
    k, v = (torch.randn(total, size, heads, d).to(dtype).transpose(1, 2) for d in dims)
    table = torch.randperm(total)[: len(lens) * width].view(len(lens), width).to(torch.int32)
    unread = torch.ones(total, size, dtype=torch.bool)
    for row, n in enumerate(lens):
        for token in range(n):
            unread[table[row, token // size], token % size] = False
        table[row, -(-n // size) :] = -1
    for pages in (k, v):
        pages.masked_fill_(unread[:, None, :, None], torch.nan)
    q = torch.randn(len(lens), queries, dims[0])
    out, lse = paged_attention(
        q, PagedKV(k, v), table, torch.tensor(lens, dtype=torch.int32), impl=impl
    )
    for row, n in enumerate(lens):
        used = table[row, : -(-n // size)].long()
        for query in range(queries):
            head = query * heads // queries
            keys, values = (x[used, head].flatten(0, 1)[:n].double() for x in (k, v))
            logits = keys @ q[row, query].double()
            expected = logits.softmax(0) @ values
            assert_close(out[row, query].double(), expected, rtol=1e-4, atol=1e-5)
            assert_close(lse[row, query].double(), logits.logsumexp(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_raw_query_is_scaled_in_float32(
    impl: str, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Scaling a query in its own 16 bits, by what is no power of two, would round it."""
    torch.manual_seed(1)
    k, v = (torch.randn(40, 2, 16, 48).to(kv_dtype) for _ in range(2))
    table = torch.randperm(40).view(2, 20).int()
    lens = torch.tensor([313, 70], dtype=torch.int32)
    # Rows of a larger tensor, as a model's projection gives them.
    q = torch.randn(2, 8, 96).to(dtype)[..., :48]
    kv, scale = PagedKV(k, v), 48**-0.5
    out, lse = paged_attention(q, kv, table, lens, rule=AttentionRule(scale), impl=impl)
    assert out.dtype in (torch.float32, dtype)
    assert lse.dtype == torch.float32
    # What is rounded: weights of a 16-bit query, and the output.
    coarse = out.dtype != torch.float32
    close = {"rtol": 1e-2, "atol": 4e-3} if coarse else {"rtol": 1e-4, "atol": 1e-5}
    for row, length in enumerate(lens.tolist()):
        keys, values = (x[table[row].long()].transpose(0, 1).flatten(1, 2) for x in (k, v))
        keys, values = (x[:, :length].double().repeat_interleave(4, 0) for x in (keys, values))
        logits = torch.einsum("hd,htd->ht", q[row].double(), keys) * scale
        expected = torch.einsum("ht,htd->hd", logits.softmax(-1), values)
        assert_close(out[row].double(), expected, **close)
        assert_close(lse[row].double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_large_logits_neither_overflow_nor_vanish(impl: str) -> None:
    k = torch.zeros(3, 1, 4, 2)
    k[1, 0, 2, 0], k[2, 0, 1, 0] = 300.0, 299.0
    v = torch.arange(12.0).view(3, 1, 4, 1)
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    q = torch.tensor([[[1.0, 0.0]]])
    out, lse = paged_attention(
        q, PagedKV(k, v), table, torch.tensor([12], dtype=torch.int32), impl=impl
    )
    weight = torch.tensor(1.0).sigmoid()
    assert_close(out[0, 0, 0], weight * 6 + (1 - weight) * 9, rtol=1e-5, atol=1e-5)
    assert_close(lse[0, 0], torch.tensor([300.0, 299.0]).logsumexp(0))


@pytest.mark.parametrize("impl", ["cpu"])
@pytest.mark.parametrize(
    ("page", "length", "message"),
    [
        pytest.param(9, 4, r"page_table: a page is outside \[0, 3\)", id="page"),
        pytest.param(0, 9, "seq_lens: got 9, expected 0 to 4, the tokens", id="length"),
    ],
)
def test_what_would_leave_memory_is_refused(
    impl: str, page: int, length: int, message: str
) -> None:
    kv = PagedKV(torch.zeros(3, 1, 4, 2), torch.zeros(3, 1, 4, 2))
    table, lens = (
        torch.tensor([[page]], dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32),
    )
    with pytest.raises(KernelError, match=message):
        paged_attention(torch.zeros(1, 1, 2), kv, table, lens, impl=impl)
