"""``paged_attention`` of every implementation against float64, with logit caps and windows."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hisparse.cache.host_pool import HOST_LAYOUTS
from hisparse.errors import HiSparseError
from hisparse.kernels import dequantize, merge_attention, paged_attention, quantize
from hisparse.types import UNSCALED, AttentionRule, PagedKV, StoredKV

#: Triton's interpreter takes a second for what a kernel does in a microsecond.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CAPS = [0.0, 5.0] if INTERPRETED else [0.0, 0.5, 5.0, 50.0]
DECODE_WINDOWS = [0, 1, 17] if INTERPRETED else [0, 1, 15, 16, 17, 40, 1000]
LONG_WINDOWS = [100] if INTERPRETED else [1, 100, 2049, 4096, 9000]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def attend(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, visible: Tensor
) -> tuple[Tensor, Tensor]:
    """``q [T, Hq, Dk]``, ``k, v [Tk, Hkv, D]``, ``visible [T, Tk]`` in float64: out and lse."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    logits = torch.einsum("thd,shd->hts", q.double(), k) * rule.scale
    if rule.logit_cap:
        logits = rule.logit_cap * (logits / rule.logit_cap).tanh()
    logits = logits.masked_fill(~visible, -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return torch.einsum("hts,shd->thd", weights, v), lse.T


def assert_near(
    got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], q: Tensor, coarse: bool = False
) -> None:
    """``got`` is near float64's output and log-sum-exp; an output of 16 bits is ``coarse``."""
    (out, lse), (want_out, want_lse) = got, wanted
    assert out.dtype in (FP32, q.dtype) and lse.dtype == FP32
    rtol, atol = (1e-2, 6e-3) if coarse or out.dtype != FP32 else (1e-4, 2e-5)
    assert_close(out.double(), want_out, rtol=rtol, atol=atol)
    assert_close(lse.double(), want_lse, rtol=1e-5, atol=2e-5)


def paged_case(
    rule: AttentionRule,
    lens: list[int],
    heads: int,
    size: int,
    dims: tuple[int, int],
    dtype: torch.dtype = FP32,
) -> tuple[PagedKV, Tensor, Tensor]:
    """Pages, page table and lengths. What is not to be read is NaN, or the page -1."""
    width = max(-(-n // size) for n in lens) + 1
    total = len(lens) * width + 1
    # As the device buffer lies in memory: a token's heads side by side.
    k, v = (torch.randn(total, size, heads, d).to(dtype).transpose(1, 2) for d in dims)
    table = torch.randperm(total)[: len(lens) * width].view(len(lens), width).int()
    unread = torch.ones(total, size, dtype=torch.bool)
    for row, n in enumerate(lens):
        oldest = max(0, n - rule.window) if rule.window else 0
        for token in range(oldest, n):
            unread[table[row, token // size], token % size] = False
        table[row, : oldest // size] = -1
        table[row, -(-n // size) :] = -1
    for pages in (k, v):
        pages.masked_fill_(unread[:, None, :, None], torch.nan)
    return PagedKV(k, v), table, torch.tensor(lens, dtype=torch.int32)


def check_paged(
    q: Tensor,
    kv: PagedKV | StoredKV,
    table: Tensor,
    lens: Tensor,
    rule: AttentionRule,
    impl: str,
    *,
    read: PagedKV | None = None,
    coarse: bool = False,
) -> None:
    """Each row over the tokens that its window leaves; ``read``: the numbers that ``kv`` has."""
    outs, lses = paged_attention(q, kv, table, lens, rule=rule, impl=impl)
    assert outs.shape == (*q.shape[:2], kv.v.shape[-1])
    for row, n in enumerate(lens.tolist()):
        oldest = max(0, n - rule.window) if rule.window else 0
        keys, values = (
            x[table[row].clamp(min=0).long()].transpose(1, 2).flatten(0, 1)[oldest:n]
            for x in (read or kv)[:2]
        )
        seen = torch.ones(1, n - oldest, dtype=torch.bool)
        wanted = attend(q[row : row + 1], keys, values, rule, seen)
        assert_near((outs[row : row + 1], lses[row : row + 1]), wanted, q, coarse)


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("window", DECODE_WINDOWS)
@pytest.mark.parametrize(
    ("queries", "heads", "size", "dims"),
    [
        pytest.param(3, 1, 16, (32, 32), id="per-head"),
        pytest.param(8, 2, 16, (24, 40), id="all-heads-odd-widths"),
        pytest.param(5, 1, 1, (7, 3), id="token-pages"),
    ],
)
def test_decode_attends_the_last_tokens_of_a_row(
    impl: str,
    cap: float,
    window: int,
    queries: int,
    heads: int,
    size: int,
    dims: tuple[int, int],
) -> None:
    """Windows of a token, about a page, within two pages, and larger than any context."""
    rule = AttentionRule(0.9, cap, window)
    case = paged_case(rule, [0, 1, 16, 33, 47, 70], heads, size, dims)
    check_paged(torch.randn(6, queries, dims[0]), *case, rule, impl)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
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
    case = paged_case(UNSCALED, lens, heads, size, dims, dtype)
    check_paged(torch.randn(len(lens), queries, dims[0]), *case, UNSCALED, impl)


@pytest.mark.parametrize("heads", [2, 4], ids=["kv-heads", "query-heads"])
@pytest.mark.parametrize("layout", HOST_LAYOUTS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_rows_attend_one_head_of_pages_that_have_all(
    impl: str, dtype: torch.dtype, layout: str, heads: int
) -> None:
    """Pages of the host pool in each of its layouts, in layer 1 of 3."""
    if impl not in ("reference", "cpu"):
        pytest.skip("on a CPU only")
    stored, size, dim, pages, rule = 2, 4, 24, 40, AttentionRule(0.3, 5.0)
    lens = [0, 40, 3, 17] * (heads // 2) + [1] * heads
    sizes = {"L": 3, "P": pages, "S": size, "H": stored, "D": dim}
    order = HOST_LAYOUTS[layout]

    def in_layer(values: Tensor) -> Tensor:
        shape = [values.shape[-1] if x == "D" else sizes[x] for x in order]
        pool = torch.full(shape, 1).to(values.dtype)
        layer = pool.permute([order.index(x) for x in "LPHSD"])[1]
        return layer.copy_(values)

    k, v = (torch.randn(pages, stored, size, dim) for _ in range(2))
    kv = StoredKV(k.to(dtype), v.to(dtype)) if dtype.itemsize > 1 else quantize(k, v, dtype)
    read = PagedKV(*(x.double() for x in kv.kv))
    if kv.scales is not None:
        dequantize(kv, read := PagedKV(torch.empty_like(k), torch.empty_like(v)))
    kv = StoredKV(*(in_layer(x) for x in kv.tensors))
    table = torch.stack([torch.randperm(pages)[:11] for _ in lens]).int()
    for row, n in enumerate(lens):
        table[row, -(-n // size) :] = -1
    query = torch.randn(len(lens), 3, dim)
    out, lse = paged_attention(
        query, kv, table, torch.tensor(lens).int(), rule=rule, heads=heads, impl=impl
    )
    for row, n in enumerate(lens):
        own = row % heads * stored // heads
        keys, values = (
            x[table[row].clamp(min=0).long(), own].flatten(0, 1)[:n, None] for x in read
        )
        one = slice(row, row + 1)
        wanted = attend(query[one], keys, values, rule, torch.ones(1, n, dtype=torch.bool))
        assert_near((out[one], lse[one]), wanted, query)


@pytest.mark.parametrize("window", LONG_WINDOWS)
def test_a_window_of_a_long_row(impl: str, window: int) -> None:
    """Tables of more than one split, some of which a window leaves nothing of."""
    rule = AttentionRule(0.3, 5.0, window)
    case = paged_case(rule, [5000, 4096, 20], 1, 16, (16, 16))
    check_paged(torch.randn(3, 4, 16), *case, rule, impl)


@pytest.mark.parametrize("kv_dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_a_raw_query_is_scaled_in_float32(
    impl: str, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Scaling a query in its own 16 bits, by what is no power of two, would round it."""
    torch.manual_seed(1)
    rule = AttentionRule(48**-0.5)
    case = paged_case(rule, [313, 70], 2, 16, (48, 48), kv_dtype)
    # Rows of a larger tensor, as a model's projection gives them.
    check_paged(torch.randn(2, 8, 96).to(dtype)[..., :48], *case, rule, impl)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("width", "rank", "queries", "cap", "window"),
    [
        pytest.param(576, 512, 16, 0.0, 0, id="deepseek"),
        pytest.param(40, 32, 35, 0.0, 0, id="small"),
        pytest.param(40, 32, 20, 2.0, 17, id="small-cap-window"),
    ],
)
@pytest.mark.parametrize("size", [1, 64], ids=lambda s: f"page{s}")
def test_values_are_columns_of_a_latent(
    impl: str, size: int, width: int, rank: int, queries: int, cap: float, window: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    rule = AttentionRule(width**-0.5, cap, window)
    kv, *rows = paged_case(rule, [0, 1, 150, 101], 1, size, (width, 1), dtype)
    shared = PagedKV(kv.k, kv.k[..., :rank])
    query = torch.randn(4, queries, width).to(dtype).float()
    # Triton rounds the weights to the latents' dtype.
    check_paged(query, shared, *rows, rule, impl, coarse=dtype == BF16)


def test_rows_share_their_places_whatever_the_strides_of_sizes_of_one() -> None:
    """Else tokens as pages of one would have their latents read twice, in blocks too large."""
    from hisparse.kernels.triton_common import same_places

    latents = torch.zeros(5, 1, 576)
    values = latents[..., :512]
    assert same_places(latents[:, :, None], values[:, :, None])
    assert not same_places(latents, values.contiguous())


def test_large_logits_neither_overflow_nor_vanish(impl: str) -> None:
    k = torch.zeros(3, 1, 4, 2)
    k[1, 0, 2, 0], k[2, 0, 1, 0] = 300.0, 299.0
    v = torch.arange(12.0).view(3, 1, 4, 1)
    rows = torch.tensor([[0, 1, 2]], dtype=torch.int32), torch.tensor([12], dtype=torch.int32)
    check_paged(torch.tensor([[[1.0, 0.0]]]), PagedKV(k, v), *rows, UNSCALED, impl)


@pytest.mark.parametrize("cap", [1.0, 30.0, 1e4])
def test_a_cap_holds_for_logits_of_every_size(impl: str, cap: float) -> None:
    """From 1e-6 to 1e6, of both signs: the log-sum-exp of one token is its logit."""
    size = torch.logspace(-6, 6, 13 if INTERPRETED else 97)
    logits = torch.cat([-size, torch.zeros(1), size])
    rows = torch.arange(len(logits), dtype=torch.int32)
    kv = PagedKV(torch.ones(len(rows), 1, 1, 1), torch.ones(len(rows), 1, 1, 1))
    table, lens, rule = rows[:, None], torch.ones_like(rows), AttentionRule(1.0, cap)
    out, lse = paged_attention(logits[:, None, None], kv, table, lens, rule=rule, impl=impl)
    expected = cap * (logits.double() / cap).tanh()
    assert_close(lse[:, 0].double(), expected, rtol=1e-6, atol=3e-7 * cap)
    assert_close(out, torch.ones_like(out))


def test_a_rule_that_cannot_be_is_refused() -> None:
    with pytest.raises(HiSparseError, match=r"got logit_cap -1.0, expected 0 \(none\) or more"):
        AttentionRule(1.0, -1.0)
    with pytest.raises(HiSparseError, match=r"got window -1, expected 0 \(none\) or more"):
        AttentionRule(1.0, 0.0, -1)


# More than a program merges, and widths that are no powers of two.
@pytest.mark.parametrize("shape", [(3, 5, 24), (37, 4, 128), (2, 8, 512)], ids=str)
@pytest.mark.parametrize("dtypes", [(BF16, FP32, BF16), (FP16, FP16, FP32), (FP32, FP32, FP32)])
@pytest.mark.parametrize("parts", ["two", "two-and-sinks", "sinks"])
def test_parts_merge_to_the_whole(
    impl: str, shape: tuple[int, int, int], dtypes: tuple[torch.dtype, ...], parts: str
) -> None:
    """Against a softmax over both parts' keys; some queries have none, in one part or in both."""
    torch.manual_seed(0)
    rows, queries, width = shape
    # As flash attention returns them: heads before tokens.
    outs = [torch.randn(queries, rows, width).transpose(0, 1).to(x) for x in dtypes[:2]]
    lses = [torch.randn(queries, rows).T * 20 for _ in outs]
    for lse, out, empty in zip(lses, outs, (slice(0, 2), slice(1, 3)), strict=True):
        lse[empty, 1:], out[empty, 1:] = -torch.inf, 0.0
    sinks = (torch.randn(queries) * 20).to(dtypes[0]) if "sinks" in parts else None
    if parts == "sinks":
        del outs[1:], lses[1:]
    given = [x for each in zip(outs, lses, strict=True) for x in each]
    out, total = merge_attention(*given, sinks=sinks, dtype=dtypes[2], impl=impl)
    logits = torch.stack(lses).double()
    want_lse = logits.logsumexp(0)
    share = want_lse if sinks is None else torch.logaddexp(want_lse, sinks.double())
    weights = (logits - share.nan_to_num(neginf=0.0)).exp()
    want = (weights[..., None] * torch.stack([x.double() for x in outs])).sum(0)
    assert out.dtype == dtypes[2] and out.shape == shape
    rtol, atol = (1e-2, 1e-3) if dtypes[2] == BF16 else (1e-4, 2e-5)
    assert_close(out.double(), want, rtol=rtol, atol=atol)
    assert_close(total.double(), want_lse, rtol=1e-5, atol=2e-5)


def test_what_is_no_number_stays_none(impl: str) -> None:
    """A query's own output: NaN in one part is not hidden by the other."""
    lse, none = torch.zeros(2, 2), torch.tensor([[torch.nan, 0.0], [0.0, -torch.inf]])
    out, total = merge_attention(torch.ones(2, 2, 8), none, torch.ones(2, 2, 8), lse, impl=impl)
    assert out[0, 0].isnan().all() and total[0, 0].isnan()
    assert_close(out.flatten(0, 1)[1:], torch.ones(3, 8))


def test_no_queries_have_no_output(impl: str) -> None:
    out, lse = torch.ones(0, 2, 8), torch.zeros(0, 2)
    merged = merge_attention(out, lse, out, lse, impl=impl)
    assert [x.shape for x in merged] == [(0, 2, 8), (0, 2)]
