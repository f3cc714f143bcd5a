"""Keys and values in eight bits: what is stored, and that it is read as it was stored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hisparse.errors import KernelError
from hisparse.kernels import decode_fp8, encode_fp8, paged_attention
from hisparse.types import StoredKV

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _read(stored: StoredKV, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out = (
        stored.k.new_empty(stored.k.shape, dtype=dtype),
        stored.v.new_empty(stored.v.shape, dtype=dtype),
    )
    decode_fp8(stored, out)
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", [(64, 64), (5, 33)], ids=str)
def test_an_error_is_at_most_half_a_step(
    impl: str, dtype: torch.dtype, widths: tuple[int, int]
) -> None:
    k, v = (_vectors(seed, dtype, width) for seed, width in enumerate(widths))
    stored = encode_fp8(k, v, impl=impl)
    for x, read in zip((k, v), _read(stored, dtype), strict=True):
        largest = x.abs().amax(-1, keepdim=True).double()
        off = (read.double() - x.double()).abs()
        # Three bits of fraction; below 2 ** -6 of what the largest is scaled to, steps of 2 ** -9.
        step = torch.maximum(x.double().abs() * 2.0**-4, largest.clamp(min=2.0**-8) * 2.0**-17)
        assert (off <= step).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_was_read_is_stored_as_the_same_bytes(impl: str, dtype: torch.dtype) -> None:
    k, v = (_vectors(seed, dtype, 16, 1000) for seed in (3, 4))
    stored = encode_fp8(k, v, impl=impl)
    read = _read(stored, dtype)
    again = encode_fp8(*read, impl=impl)
    for before, after in zip(stored.tensors, again.tensors, strict=True):
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
    # In any dtype the same numbers are read.
    exact = _read(stored, torch.float32)
    for x, wide in zip(read, exact, strict=True):
        assert torch.equal(x.float(), wide)


def test_the_largest_of_float16_stays_a_number(impl: str) -> None:
    """The next number of e4m3 above them, times the scale, is 65536: infinity in float16."""
    k = torch.tensor([[[65504.0, -65504.0, 61440.0, 2048.0]]], dtype=torch.float16)
    read, _ = _read(encode_fp8(k, k, impl=impl), torch.float16)
    assert read.tolist() == [[[61440.0, -61440.0, 61440.0, 2048.0]]]
    wide, _ = _read(encode_fp8(k.float(), k.float(), impl=impl), torch.float32)
    assert wide.tolist() == [[[65536.0, -65536.0, 61440.0, 2048.0]]], "the others keep their range"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_implementations_agree_to_the_bit(impl: str, dtype: torch.dtype) -> None:
    k, v = (_vectors(seed, dtype, 48) for seed in (5, 6))
    # Halfway between two numbers, and all that e4m3 has.
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[~numbers.isnan()].sort().values[:240].view(5, 1, 48)
    between = (numbers + numbers.roll(-1, -1)) / 2
    k[:5], k[5:10], k[10, 0, 0], k[11, 1, 3] = (
        numbers.to(dtype),
        between.to(dtype),
        torch.nan,
        torch.inf,
    )
    # Strided, as heads of a fused projection are.
    k = torch.stack([k, k], dim=-1)[..., 0]
    expected, got = encode_fp8(k, v, impl="reference"), encode_fp8(k, v, impl=impl)
    for name, a, b in zip(("k", "v", "scales"), expected.tensors, got.tensors, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


def test_no_tokens_and_no_leading_dimensions(impl: str) -> None:
    empty = encode_fp8(torch.zeros(0, 2, 8), torch.zeros(0, 2, 4), impl=impl)
    assert [x.shape for x in empty.tensors] == [(0, 2, 8), (0, 2, 4), (0, 2, 2)]
    pages = encode_fp8(torch.ones(3, 2, 4, 8), torch.ones(3, 2, 4, 8), impl=impl)
    assert pages.tensors[2].shape == (3, 2, 4, 2)
    assert (_read(pages, torch.float32)[0] == 1).all()


@pytest.mark.parametrize(
    ("heads", "size", "dims"),
    [(1, 16, (64, 64)), (2, 8, (24, 40)), (1, 1, (5, 3)), (1, 16, (128, 128))],
    ids=str,
)
def test_attends_over_what_is_read(impl: str, heads: int, size: int, dims: tuple[int, int]) -> None:
    """Against float64 over the numbers that are read; nothing beyond a row's tokens matters."""
    lens, pages = [0, 1, 3 * size, 260], 300 // size + 2
    rng = torch.Generator().manual_seed(size)
    k, v = (
        torch.randn(pages * len(lens), size, heads, d, generator=rng).transpose(1, 2) * 40
        for d in dims
    )
    # Every token has a scale of its own.
    k *= torch.exp2(torch.randint(-9, 1, k.shape[:3], generator=rng))[..., None]
    v *= torch.exp2(torch.randint(-9, 9, v.shape[:3], generator=rng))[..., None]
    stored = encode_fp8(k, v)
    keys, values = _read(stored, torch.float32)
    table = torch.randperm(len(k), generator=rng).view(len(lens), -1).to(torch.int32)
    q = torch.randn(len(lens), 4, dims[0], generator=rng) * 0.1
    out, lse = paged_attention(q, stored, table, torch.tensor(lens, dtype=torch.int32), impl=impl)
    for row, n in enumerate(lens):
        for query in range(4):
            head = query * heads // 4
            own_k, own_v = (x[table[row].long(), head].flatten(0, 1)[:n] for x in (keys, values))
            logits = own_k.double() @ q[row, query].double()
            expected = logits.softmax(0) @ own_v.double()
            assert_close(out[row, query].double(), expected, rtol=2e-4, atol=2e-3)
            assert_close(lse[row, query].double(), logits.logsumexp(0), rtol=1e-4, atol=1e-4)


def test_wrong_tensors_are_named() -> None:
    k = torch.zeros(2, 1, 4, 8)
    stored = encode_fp8(k, k)
    with pytest.raises(KernelError, match="k: got dtype torch.int32"):
        encode_fp8(k.int(), k.int())
    with pytest.raises(KernelError, match="v: got shape"):
        encode_fp8(k, k[:1])
    with pytest.raises(KernelError, match="scales: got None"):
        decode_fp8(stored._replace(scales=None), (k, k))
    with pytest.raises(KernelError, match=r"out.v: got shape \[1, 1, 4, 8\]"):
        decode_fp8(stored, (k, k[:1]))
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    bad = stored._replace(scales=stored.tensors[2][:, :, :2])
    with pytest.raises(KernelError, match="kv.scales: got shape"):
        paged_attention(torch.zeros(1, 1, 8), bad, table, lens)
