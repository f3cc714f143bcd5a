"""``page_summary``: ranges, outward rounding, and the bound that they are there for."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels import page_score, page_summary, store_index_keys
from hisparse.kernels.summary.reference import round_outward

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def some_keys(pages: int, size: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """As a chunk's keys lie: tokens one after the other, more columns in between."""
    fused = torch.randn(pages * size, heads, dim + 8) * torch.logspace(-3, 2, dim + 8)
    return fused.to(dtype)[..., :dim].unflatten(0, (pages, size))


@pytest.mark.parametrize("to", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("pages", "size", "heads", "dim"),
    [(5, 16, 2, 64), (63, 1, 3, 24), (1, 7, 1, 128), (0, 16, 2, 64)],
    ids=["usual", "token-pages", "odd-page", "none"],
)
def test_maxima_and_minima_rounded_outward(
    impl: str, pages: int, size: int, heads: int, dim: int, dtype: str, to: str
) -> None:
    torch.manual_seed(pages)
    keys = some_keys(pages, size, heads, dim, DTYPES[dtype])
    summaries = torch.full((100, heads, 2 * dim), torch.nan, dtype=DTYPES[to])
    # A GPU leaves out page 0, which is padding.
    where = 1 + torch.randperm(99)[:pages].int()
    page_summary(keys, summaries[:, None], where, impl=impl)
    high, low = summaries[where.long()].float().split(dim, dim=-1)
    exact_high, exact_low = keys.float().amax(1), keys.float().amin(1)
    assert (high >= exact_high).all()
    assert (low <= exact_low).all()
    exact = to == "fp32" or dtype == "bf16"
    for rounded, value in ((high, exact_high), (low, exact_low)):
        # Never further off than one step of the narrower type.
        torch.testing.assert_close(rounded, value, rtol=0 if exact else 2**-7, atol=0)
    untouched = torch.ones(100, dtype=torch.bool).index_fill_(0, where.long(), False)
    assert summaries[untouched].isnan().all()


@pytest.mark.parametrize("up", [True, False], ids=["up", "down"])
def test_fp8_is_rounded_to_the_next_value_outward(up: bool) -> None:
    """Every value of the type, and what lies between and beside them."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = values[values.isfinite()].unique()
    between = (values[1:] + values[:-1]) / 2
    near = torch.cat([values * (1 + 1e-6), values * (1 - 1e-6)]).clamp(-448, 448)
    x = torch.cat([values, between, near, torch.tensor([1e-9, -1e-9, 0.0, -0.0])])
    rounded = round_outward(x, torch.float8_e4m3fn, up=up).float()
    at = torch.searchsorted(values, x) if up else torch.searchsorted(values, x, right=True) - 1
    assert torch.equal(rounded, values[at])


def test_all_implementations_agree_bitwise(impl: str) -> None:
    torch.manual_seed(0)
    keys = some_keys(40, 16, 2, 40, torch.float32)
    got, expected = (torch.zeros(50, 2, 80, dtype=torch.bfloat16) for _ in range(2))
    where = 1 + torch.randperm(49)[:40]
    where[::7] = -1
    page_summary(keys, got[:, None], where, impl=impl)
    page_summary(keys, expected[:, None], where, impl="reference")
    assert torch.equal(got, expected)
    assert (got.flatten(1) != 0).any(1).sum() == 34


@pytest.mark.parametrize("to", ["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(3), ids=lambda s: f"seed{s}")
def test_scores_bound_every_logit_of_a_page(impl: str, to: str, seed: int) -> None:
    """Quest's section 3.3: no q.k in a page exceeds its score."""
    torch.manual_seed(seed)
    keys = some_keys(20, 16, 2, 64, torch.float32)
    query = torch.randn(1, 6, 64) * torch.logspace(1, -2, 64)
    summaries = torch.zeros(21, 2, 128, dtype=DTYPES[to])
    page_summary(keys, summaries[:, None], torch.arange(1, 21), impl=impl)
    table = torch.arange(1, 21, dtype=torch.int32)[None]
    lens = torch.tensor([20], dtype=torch.int32)
    bound = page_score(query, summaries[:, None], table, lens, impl=impl)[0]
    logits = torch.einsum(
        "hgd,pshd->hgps", query[0].double().unflatten(0, (2, 3)), keys.double()
    ).flatten(0, 1)
    # Scores are sums in float32: what they may fall short by is its rounding.
    size = torch.einsum("hgd,phd->hgp", query[0].abs().unflatten(0, (2, 3)), keys.abs().amax(1))
    assert (bound + 1e-5 * size.flatten(0, 1) >= logits.amax(-1)).all()


def test_scales_that_are_not_contiguous_are_refused(impl: str) -> None:
    """A GPU would write where the scales of other pages, or other tensors, lie."""
    fp8, two = torch.float8_e4m3fn, torch.arange(2).int()
    store = partial(page_summary, torch.ones(2, 4, 3, 8), torch.zeros(4, 1, 3, 16).to(fp8), two)
    store(scales=torch.zeros(4, 1, 3), impl=impl)
    with pytest.raises(KernelError, match=r"scales: got strides \[6, 6, 2\], expected a contig"):
        store(scales=torch.zeros(4, 1, 6)[..., ::2], impl=impl)
    keys = torch.zeros(4, 8).to(fp8)
    with pytest.raises(KernelError, match=r"scales: got strides \[2\], expected a contiguous"):
        store_index_keys(torch.ones(2, 8), keys, two, scales=torch.zeros(8)[::2], impl=impl)


def test_a_page_beyond_the_summaries_is_refused_or_left_out(impl: str) -> None:
    """A GPU cannot say so without a wait; it never writes there."""
    summaries = torch.zeros(5, 1, 1, 16)
    store = partial(page_summary, torch.ones(1, 4, 1, 8), summaries[:4], torch.tensor([4]))
    if impl in ("reference", "cpu"):
        with pytest.raises((KernelError, IndexError)):
            store(impl=impl)
    else:
        store(impl=impl)
    assert not summaries.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [24, 128])
def test_scaled_fp8_summaries_are_the_references(impl: str, dim: int, dtype: str) -> None:
    torch.manual_seed(0)
    keys = some_keys(6, 8, 2, dim, DTYPES[dtype])
    keys[3] = 0
    if dtype == "fp32":
        # Just above what a power of two times 448 holds.
        keys[5] = 0
        keys[5, :, :, 2] = 448 * 2.0**10 * (1 + 2.0**-22)
    where = 1 + torch.randperm(20)[:6]
    found = []
    for by in (impl, "reference"):
        summaries = torch.zeros(21, 4, 2, 2 * dim, dtype=torch.float8_e4m3fn)
        scales = torch.zeros(21, 4, 2)
        page_summary(keys, summaries, where, scales=scales, impl=by)
        found.append((summaries, scales))
    (got, got_scales), (expected, expected_scales) = found
    assert torch.equal(got_scales, expected_scales)
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    high, low = (got.float() * got_scales[..., None])[where].chunk(2, -1)
    own = keys.float().unflatten(1, (4, 2))
    assert (high >= own.amax(2)).all()
    assert (low <= own.amin(2)).all()


def numbers(kind: str, shape: tuple[int, ...]) -> Tensor:
    if kind == "bits":
        bits = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)
        return bits.view(torch.float32).nan_to_num()
    if kind == "steps":
        return torch.randint(-448 * 512, 448 * 512, shape) / 512
    sizes = torch.randn(shape) * torch.exp2(torch.randint(-12, 1, shape).float())
    if kind == "nan":
        sizes.masked_fill_(torch.rand(shape) < 0.02, torch.nan)
        sizes.masked_fill_(torch.rand(shape) < 0.02, torch.inf)
    return sizes


@pytest.mark.parametrize("to", [torch.float8_e4m3fn, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["bits", "steps", "sizes", "nan"])
def test_any_numbers_have_the_references_ranges(impl: str, kind: str, to: torch.dtype) -> None:
    """Signs of zeros and of NaN may differ."""
    torch.manual_seed(0)
    for dtype in DTYPES.values():
        keys = numbers(kind, (6, 12, 2, 41)).to(dtype)
        if impl != "cpu":
            # A GPU may take float32's subnormal numbers for zeros.
            keys = torch.where(keys.abs() < 2.0**-126, 0, keys)
        found = []
        for by in (impl, "reference"):
            summaries = torch.zeros(7, 3, 2, 82, dtype=to)
            scales = torch.zeros(7, 3, 2) if to == torch.float8_e4m3fn else None
            page_summary(keys, summaries, torch.arange(1, 7), scales=scales, impl=by)
            found.append((summaries.float(), scales))
        torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)


def test_keys_of_padding_change_no_page_of_a_request(impl: str) -> None:
    keys = torch.ones(2, 4, 1, 8)
    keys[1] = torch.nan
    summaries = torch.zeros(4, 1, 1, 16)
    page_summary(keys, summaries, torch.tensor([2, 0]), impl=impl)
    assert (summaries[2] == 1).all()
    assert not summaries[[1, 3]].any()
    if impl not in ("reference", "cpu"):
        assert not summaries[0].any()
