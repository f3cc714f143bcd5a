"""``page_outline`` and ``outline_score``: bytes, what they stand for, and their scores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hisparse.kernels import SketchLayout, outline_bytes, outline_score, page_outline, page_sketch
from hisparse.kernels.sketch.reference import base_values, outline_values
from tests.kernels.conftest import check_unwritten


def outlined(pages: int, heads: int, dim: int, channels: int) -> tuple[Tensor, Tensor]:
    """Sketches and outlines of random pages; one channel in ten is far above the others."""
    layout = SketchLayout(dim, 4, channels, numbered=False)
    keys = torch.randn(pages, 4, heads, dim) + torch.randn(heads, dim)
    keys[..., ::10] *= 8
    sketches = torch.zeros(pages, heads, layout.num_bytes, dtype=torch.uint8)
    page_sketch(keys, sketches, torch.arange(pages), layout)
    return sketches, page_outline(sketches, layout)


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 576])
def test_two_percent_of_the_key_bytes(dim: int) -> None:
    assert 0.019 < outline_bytes(dim) / (16 * dim * 2) < 0.02


@pytest.mark.parametrize(("dim", "channels"), [(64, 20), (21, 5), (80, 0), (8, 8)])
def test_an_outline_stands_for_the_sketchs_base(dim: int, channels: int) -> None:
    """The nearest of the levels, to within rounding of the inverse: steps grow with the value."""
    torch.manual_seed(0)
    sketches, outlines = outlined(5, 2, dim, channels)
    assert outlines.shape == (5, 2, outline_bytes(dim))
    got = outline_values(outlines, dim)
    base = base_values(sketches, SketchLayout(dim, 4, channels, numbered=False))
    blocks = torch.nn.functional.pad(base.abs(), (0, -dim % 8)).unflatten(-1, (-1, 8)).amax(-1)
    most = blocks.repeat_interleave(8, dim=-1)[..., :dim]
    assert ((got - base).abs() <= 0.045 * most + 0.14 * base.abs()).all()
    assert (got.sign() * base.sign() >= 0).all()


@pytest.mark.parametrize(
    ("batch", "q_heads", "kv_heads", "dim", "pages"),
    [
        (1, 14, 2, 64, 70),
        (3, 6, 3, 21, 9),
        (2, 8, 1, 128, 130),
        (1, 17, 1, 576, 5),
        (2, 3, 3, 80, 1),
        # In Triton's interpreter three programs take 15 turns at 44 blocks.
        (4, 2, 1, 16, 700),
    ],
)
def test_scores_are_products(
    impl: str, batch: int, q_heads: int, kv_heads: int, dim: int, pages: int
) -> None:
    torch.manual_seed(1)
    _, outlines = outlined(150, kv_heads, dim, dim // 4)
    query = torch.randn(batch, q_heads, dim) / dim**0.5
    # The table is a part of a wider one, as the coordinator hands it over.
    table = torch.randint(150, (batch, pages + 3), dtype=torch.int32)[:, :pages]
    num_pages = torch.randint(pages + 1, (batch,), dtype=torch.int32)
    num_pages[0] = pages
    num_pages[2:] = 0
    scores = outline_score(query, outlines, table, num_pages, impl=impl)
    own = outline_values(outlines, dim)[table.long()].double()
    own = own.repeat_interleave(q_heads // kv_heads, dim=2)
    expected = torch.einsum("bhd,bphd->bhp", query.double(), own)
    absent = (torch.arange(pages) >= num_pages[:, None])[:, None].expand_as(scores)
    assert_close(scores[~absent], expected[~absent].float(), rtol=1e-5, atol=1e-4)
    check_unwritten(impl, scores, absent)


def test_a_page_beyond_the_outlines_is_refused() -> None:
    one = torch.ones(1, dtype=torch.int32)
    outlines = torch.zeros(4, 1, outline_bytes(8), dtype=torch.uint8)
    for impl in ("reference", "cpu"):
        with pytest.raises((ValueError, IndexError)):
            outline_score(torch.zeros(1, 1, 8), outlines, one[None] * 4, one, impl=impl)
