"""Keys and values in eight bits: what is stored, and that it is read as it was stored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hisparse.kernels import QUANTIZED, dequantize, quantize
from hisparse.types import AttentionRule, PagedKV, StoredKV
from tests.kernels.test_attention import check_paged, paged_case

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
EVERY_DTYPE = pytest.mark.parametrize("stored_dtype", QUANTIZED, ids=str)


def _read(stored: StoredKV, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out = (
        stored.k.new_empty(stored.k.shape, dtype=dtype),
        stored.v.new_empty(stored.v.shape, dtype=dtype),
    )
    dequantize(stored, out)
    return out


def _vectors(seed: int, dtype: torch.dtype, width: int, count: int = 400) -> Tensor:
    """``[count, 3, width]`` of every size that keys have, most far from 1, some all zeros."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, width, generator=rng)
    x *= torch.exp2(torch.rand(count, 3, 1, generator=rng) * 15 - 12)
    # Within a vector too: keys of some models have a few channels that dwarf the others.
    x *= torch.exp2(torch.rand(count, 1, width, generator=rng) * 8)
    x[:5] = 0
    x[5, 0] = torch.linspace(-1, 1, width) * 2.0**-20
    return x.to(dtype)


@EVERY_DTYPE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", [(64, 64), (5, 33)], ids=str)
def test_an_error_is_at_most_half_a_step(
    impl: str, dtype: torch.dtype, widths: tuple[int, int], stored_dtype: torch.dtype
) -> None:
    k, v = (_vectors(seed, dtype, width) for seed, width in enumerate(widths))
    stored = quantize(k, v, stored_dtype, impl=impl)
    for x, read in zip((k, v), _read(stored, dtype), strict=True):
        largest = x.abs().amax(-1, keepdim=True).double()
        off = (read.double() - x.double()).abs()
        if stored_dtype == INT8:
            # The largest is scaled to 63.75 at least; no scale is below 2 ** -24.
            half = (largest / 127.5).clamp(min=2.0**-25)
        else:
            # Three bits of fraction; below 2 ** -6 of the scaled largest, steps of 2 ** -9.
            half = torch.maximum(x.double().abs() * 2.0**-4, largest.clamp(min=2.0**-8) * 2.0**-17)
        assert (off <= half).all()


@EVERY_DTYPE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_was_read_is_stored_as_the_same_bytes(
    impl: str, dtype: torch.dtype, stored_dtype: torch.dtype
) -> None:
    k, v = (_vectors(seed, dtype, 16, 1000) for seed in (3, 4))
    stored = quantize(k, v, stored_dtype, impl=impl)
    read = _read(stored, dtype)
    again = quantize(*read, stored_dtype, impl=impl)
    for before, after in zip(stored.tensors, again.tensors, strict=True):
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
    # In any dtype the same numbers are read.
    exact = _read(stored, torch.float32)
    for x, wide in zip(read, exact, strict=True):
        assert torch.equal(x.float(), wide)


@EVERY_DTYPE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_is_read_as_by_the_reference(
    dtype: torch.dtype, stored_dtype: torch.dtype
) -> None:
    """Of any strides, and NaN too."""
    codes = torch.arange(256, dtype=torch.uint8).view(stored_dtype).repeat(2, 12, 1)
    # From the least scale on that the dtype has.
    scales = torch.arange(112, 136, dtype=torch.uint8).view(2, 12, 1).expand(-1, -1, 2)
    for k in (codes, torch.stack([codes, codes], -1)[..., 0], codes.transpose(0, 1)):
        given = StoredKV(k, k, scales.transpose(0, 1) if k.shape[0] == 12 else scales)
        outs = [
            (torch.zeros(k.shape, dtype=dtype), torch.zeros(k.shape, dtype=dtype)) for _ in "ab"
        ]
        for name, out in zip(("reference", "auto"), outs, strict=True):
            dequantize(given, out, impl=name)
        for expected, got in zip(*outs, strict=True):
            assert torch.equal(expected.nan_to_num(7.5), got.nan_to_num(7.5))
            assert torch.equal(expected.isnan(), got.isnan())
            assert torch.equal(expected.signbit()[~got.isnan()], got.signbit()[~got.isnan()])


@pytest.mark.parametrize(("stored_dtype", "most"), [(E4M3, 61440.0), (INT8, 65024.0)], ids=str)
def test_the_largest_of_float16_stays_a_number(
    impl: str, stored_dtype: torch.dtype, most: float
) -> None:
    """The next number above them, times the scale, is 65536: infinity in float16."""
    k = torch.tensor([[[65504.0, -65504.0, most, 2048.0]]], dtype=torch.float16)
    read, _ = _read(quantize(k, k, stored_dtype, impl=impl), torch.float16)
    assert read.tolist() == [[[most, -most, most, 2048.0]]]
    wide, _ = _read(quantize(k.float(), k.float(), stored_dtype, impl=impl), torch.float32)
    assert wide[..., :2].tolist() == [[[65536.0, -65536.0]]], "the others keep their range"


@EVERY_DTYPE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_implementations_agree_to_the_bit(
    impl: str, dtype: torch.dtype, stored_dtype: torch.dtype
) -> None:
    k, v = (_vectors(seed, dtype, 48) for seed in (5, 6))
    # Halfway between two numbers, and all that the dtype has.
    numbers = torch.arange(256, dtype=torch.uint8).view(stored_dtype).float()
    numbers = numbers[~numbers.isnan()].sort().values[:240].view(5, 1, 48)
    between = (numbers + numbers.roll(-1, -1)) / 2
    k[:5], k[5:10], k[10, 0, 0], k[11, 1, 3] = (
        numbers.to(dtype),
        between.to(dtype),
        torch.nan,
        torch.inf,
    )
    # The NaN that GPUs make: all bits of its fraction are set.
    k[12, 2, 1] = torch.tensor(-1, dtype=torch.int32).view(torch.float32).abs().to(dtype)
    # Strided, as heads of a fused projection are.
    k = torch.stack([k, k], dim=-1)[..., 0]
    expected, got = (quantize(k, v, stored_dtype, impl=name) for name in ("reference", impl))
    for name, a, b in zip(("k", "v", "scales"), expected.tensors, got.tensors, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


@EVERY_DTYPE
def test_no_tokens_and_no_leading_dimensions(impl: str, stored_dtype: torch.dtype) -> None:
    empty = quantize(torch.zeros(0, 2, 8), torch.zeros(0, 2, 4), stored_dtype, impl=impl)
    assert [x.shape for x in empty.tensors] == [(0, 2, 8), (0, 2, 4), (0, 2, 2)]
    pages = quantize(torch.ones(3, 2, 4, 8), torch.ones(3, 2, 4, 8), stored_dtype, impl=impl)
    assert pages.tensors[2].shape == (3, 2, 4, 2)
    assert (_read(pages, torch.float32)[0] == 1).all()


def test_integers_keep_no_nan(impl: str) -> None:
    k = torch.tensor([[[torch.nan, 3.0, -torch.inf]], [[0.5, -1.0, torch.nan]]])
    read, _ = _read(quantize(k, k, INT8, impl=impl), torch.float32)
    assert read.flatten().tolist() == [0.0, 0.0, -torch.inf, 0.0, 0.0, 0.0]


@EVERY_DTYPE
@pytest.mark.parametrize(
    ("heads", "size", "dims"),
    [(1, 16, (64, 64)), (2, 8, (24, 40)), (1, 1, (5, 3)), (1, 16, (128, 128))],
    ids=str,
)
def test_attends_over_what_is_read(
    impl: str, heads: int, size: int, dims: tuple[int, int], stored_dtype: torch.dtype
) -> None:
    """The scales of keys belong to the logits that are capped."""
    kv, table, lens = paged_case(AttentionRule(1.0), [0, 1, 3 * size, 260], heads, size, dims)
    # Every token has a scale of its own.
    spread = [torch.exp2(torch.randint(-9, 1, x.shape[:3]))[..., None] for x in kv]
    k, v = (x.nan_to_num() * 9 * each for x, each in zip(kv, spread, strict=True))
    stored = quantize(k, v, stored_dtype)
    read = PagedKV(*_read(stored, torch.float32))
    for rule in (AttentionRule(0.3), AttentionRule(0.3, 2.0, 17)):
        check_paged(torch.randn(4, 4, dims[0]), stored, table, lens, rule, impl, read=read)
