"""Latents in eight bits: DeepSeek's bytes, the error of e4m3, and nothing else lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hisparse.kernels import decode_latents, encode_latents
from hisparse.kernels.quantize.op import LatentRow

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEEPSEEK = LatentRow(512, 64)
#: Also those of tiny models, and widths that fill no vector.
ROWS = [DEEPSEEK, LatentRow(64, 16), LatentRow(192, 5), LatentRow(6, 0)]


def latents(row: LatentRow, dtype: torch.dtype, count: int = 60) -> Tensor:
    """``[count, 1, width]``: tiles of every size, zeros, and numbers that bfloat16 rounds."""
    rng = torch.Generator().manual_seed(row.width)
    x = torch.randn(count, 1, row.width, generator=rng)
    x *= torch.exp2(torch.rand(count, 1, 1, generator=rng) * 20 - 14)
    x[..., : row.tile] *= 16
    x[:3] = 0
    return x.to(dtype)


def decoded(rows: Tensor, row: LatentRow, dtype: torch.dtype, impl: str = "reference") -> Tensor:
    """Every row, as a page of one token."""
    tokens = rows.flatten(0, -2)[:, None]
    out = torch.full((len(tokens), 1, row.width), torch.nan, dtype=dtype)
    decode_latents(tokens, torch.arange(len(tokens), dtype=torch.int32), row, out, impl=impl)
    return out.view(*rows.shape[:-1], row.width)


def test_the_bytes_are_deepseeks() -> None:
    """As vLLM's and SGLang's ``fp8_ds_mla``: 512 codes, 4 scales in float32, 64 in bfloat16."""
    assert DEEPSEEK.num_bytes == 656
    x = latents(DEEPSEEK, torch.float32, 8)
    row = encode_latents(x, DEEPSEEK)[7, 0]
    codes, scales = row[:512].view(torch.float8_e4m3fn), row[512:528].view(torch.float32)
    rope = row[528:].view(torch.bfloat16)
    assert torch.equal(rope, x[7, 0, 512:].bfloat16())
    assert (scales.log2() == scales.log2().round()).all()
    numbers = codes.double().view(4, 128) * scales.double()[:, None]
    exact = x[7, 0, :512].double().view(4, 128)
    assert ((numbers - exact).abs() <= exact.abs() * 2.0**-4 + scales[:, None] * 2.0**-10).all()
    assert torch.equal(
        decoded(row[None, None], DEEPSEEK, torch.float32)[0, 0, :512].view(4, 128).double(), numbers
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_an_error_is_at_most_half_a_step(impl: str, row: LatentRow, dtype: torch.dtype) -> None:
    x = latents(row, dtype)
    read = decoded(encode_latents(x, row, impl=impl), row, dtype, impl)
    off = (read.double() - x.double()).abs()
    tiles = x[..., : row.rank].double().unflatten(-1, (row.num_tiles, row.tile)).abs()
    # Three bits of fraction; below 2 ** -6 of what the largest is scaled to, steps of 2 ** -9.
    step = torch.maximum(
        tiles * 2.0**-4, tiles.amax(-1, keepdim=True).clamp(min=2.0**-8) * 2.0**-17
    )
    assert (off[..., : row.rank].view_as(tiles) <= step).all()
    rope = x[..., row.rank :].double().abs()
    assert (off[..., row.rank :] <= torch.maximum(rope * 2.0**-8, torch.tensor(2.0**-25))).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_what_was_read_is_stored_as_the_same_bytes(row: LatentRow, dtype: torch.dtype) -> None:
    """So a chunk attends what a later chunk reads of it."""
    rows = encode_latents(latents(row, dtype), row)
    read = decoded(rows, row, dtype)
    assert torch.equal(encode_latents(read, row), rows)
    assert torch.equal(read.float(), decoded(rows, row, torch.float32)), "exact in every dtype"


def test_the_largest_of_float16_stays_a_number(impl: str) -> None:
    row = LatentRow(4, 2)
    x = torch.tensor([[65504.0, -65504.0, 2048.0, 0.0, 65504.0, -65504.0]], dtype=torch.float16)
    read = decoded(encode_latents(x, row, impl=impl), row, torch.float16, impl)
    assert read.tolist() == [[61440.0, -61440.0, 2048.0, 0.0, 65280.0, -65280.0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_implementations_agree_to_the_bit(impl: str, row: LatentRow, dtype: torch.dtype) -> None:
    x = latents(row, dtype)
    x[5, 0, 0] = torch.inf
    # Strided, as a part of a fused projection is.
    x = torch.cat([x, x], dim=-1)[..., : row.width]
    rows = encode_latents(x, row, impl="reference")
    assert torch.equal(encode_latents(x, row, impl=impl), rows)
    # Pages with other bytes between them, some not asked for, one twice, one that is none.
    pages = torch.randint(256, (20, 2, 3, row.num_bytes), dtype=torch.uint8)[:, 0]
    pages.copy_(rows[:, 0].view(20, 3, -1))
    table = torch.tensor([7, 3, -1, 19, 3], dtype=torch.int32)
    out = [torch.zeros(5, 3, row.width, dtype=dtype) for _ in range(2)]
    decode_latents(pages, table, row, out[0], impl="reference")
    decode_latents(pages, table, row, out[1], impl=impl)
    asked = [0, 1, 3, 4]
    assert torch.equal(out[0][asked], out[1][asked])


def test_nothing_to_encode(impl: str) -> None:
    row = LatentRow(64, 16)
    assert encode_latents(torch.zeros(0, 1, 80), row, impl=impl).shape == (0, 1, 112)
    pages, none = torch.zeros(3, 2, 112, dtype=torch.uint8), torch.zeros(0, dtype=torch.int32)
    decode_latents(pages, none, row, torch.zeros(0, 2, 80), impl=impl)
