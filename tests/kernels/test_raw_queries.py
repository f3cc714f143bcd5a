"""Scores from queries as the model gives them: ``page_score``, ``sketch_score`` and tail pages."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hisparse.kernels import (
    QUANTIZED,
    SketchLayout,
    TailPages,
    page_score,
    page_sketch,
    page_summary,
    quantize,
    sketch_score,
)
from hisparse.kernels.quantize.reference import read_scales
from hisparse.kernels.sketch.reference import sketch_keys
from hisparse.types import StoredKV
from tests.kernels.conftest import check_unwritten
from tests.kernels.test_page_sketch import most_by_rounding

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = 0.3


def read_as_bytes(module: str, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPUs before compute capability 8.9 read e4m3."""
    if impl not in ("reference", "cpu"):
        own = importlib.import_module(f"hisparse.kernels.{module}.triton")
        monkeypatch.setattr(own, "reads_e4m3", lambda device: False)


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim", "dtype", "stored"),
    [
        *((9, 3, 24, dtype, stored) for dtype in DTYPES for stored in ("fp32", "bf16", "fp8")),
        (4, 2, 24, "bf16", "fp8-bytes"),
        (12, 1, 160, "bf16", "fp8"),
        (12, 1, 160, "fp32", "bf16"),
    ],
)
def test_page_scores_are_those_of_the_scaled_query(
    impl: str,
    q_heads: int,
    kv_heads: int,
    dim: int,
    dtype: str,
    stored: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To float32's rounding of the terms, however far apart channels are."""
    if stored == "fp8-bytes":
        read_as_bytes("summary", impl, monkeypatch)
        stored = "fp8"
    torch.manual_seed(0)
    spread = torch.logspace(-3, 2, dim)
    query = (torch.randn(3, q_heads, 2, dim) / spread).to(DTYPES[dtype])[:, :, 1]
    keys = torch.randn(140, 8, kv_heads, dim) * spread
    to = torch.float8_e4m3fn if stored == "fp8" else DTYPES[stored]
    summaries = torch.zeros(140, 2, kv_heads, 2 * dim, dtype=to)
    scales = torch.zeros(140, 2, kv_heads) if stored == "fp8" else None
    page_summary(keys, summaries, torch.arange(140), scales=scales, impl="reference")
    table = torch.randint(140, (3, 83), dtype=torch.int32)[:, :81]
    num_pages = torch.tensor([81, 3, 0], dtype=torch.int32)
    scores = page_score(query, summaries, table, num_pages, scales=scales, scale=SCALE, impl=impl)
    own = summaries.double() if scales is None else summaries.double() * scales[..., None]
    high, low = own[table.long()].repeat_interleave(q_heads // kv_heads, dim=3).chunk(2, -1)
    q = SCALE * query.double()[:, None, None]
    expected = torch.maximum(q * high, q * low).sum(-1).amax(2).transpose(1, 2)
    size = torch.maximum((q * high).abs(), (q * low).abs()).sum(-1).amax(2).transpose(1, 2)
    present = (torch.arange(81) < num_pages[:, None])[:, None].expand_as(scores)
    assert scores.dtype == torch.float32
    check_unwritten(impl, scores, ~present)
    assert ((scores - expected).abs() <= 2e-6 * size)[present].all()


def test_a_query_that_is_no_number_gives_no_score(impl: str) -> None:
    """Not a low one, which would hide the fault."""
    query = torch.ones(2, 2, 8)
    query[0, 1, 3] = torch.nan
    one = torch.ones(2, 1, dtype=torch.int32)
    scores = page_score(query, torch.ones(2, 1, 1, 16), one, one[:, 0], impl=impl)
    assert scores[..., 0].isnan().tolist() == [[False, True], [False, False]]


@pytest.mark.parametrize(
    ("size", "dim", "channels", "dtype", "q_heads"),
    [
        (16, 64, 20, "bf16", 4),
        (7, 21, 5, "fp32", 4),
        (5, 136, 9, "fp16", 4),
        (1, 24, 0, "bf16", 4),
        (16, 128, 40, "bf16", 8),
        (16, 128, 40, "fp16", 24),
        (16, 256, 80, "bf16", 6),
        (16, 576, 180, "bf16", 34),
        (32, 96, 30, "bf16", 20),
    ],
)
def test_sketch_scores_are_those_of_the_scaled_query(
    impl: str, dtype: str, size: int, dim: int, channels: int, q_heads: int
) -> None:
    torch.manual_seed(1)
    layout = SketchLayout(dim, size, channels, impl != "cpu")
    keys = torch.randn(50, size, 2, dim) + 3 * torch.randn(2, dim)
    sketches = torch.zeros(50, 2, layout.num_bytes, dtype=torch.uint8)
    page_sketch(keys, sketches, torch.arange(50), layout, impl="reference")
    query = torch.randn(2, q_heads, 2, dim).to(DTYPES[dtype])[:, :, 1]
    table = torch.randint(50, (2, 80), dtype=torch.int32)
    num_pages = torch.tensor([80, 2], dtype=torch.int32)
    scores, _ = sketch_score(query, sketches, table, num_pages, layout, scale=SCALE, impl=impl)
    own = sketch_keys(sketches, layout)[table.long()].double()
    own = own.repeat_interleave(q_heads // 2, dim=2)
    expected = torch.einsum("bhd,bphsd->bhps", SCALE * query.double(), own).logsumexp(-1)
    present = (torch.arange(80) < num_pages[:, None])[:, None].expand_as(scores)
    check_unwritten(impl, scores, ~present)
    slack = 1e-3 + most_by_rounding(SCALE * query.float(), sketches, table, layout, impl)
    assert ((scores - expected).abs() <= slack)[present].all()


CODES = {str(dtype).removeprefix("torch."): dtype for dtype in QUANTIZED}


def stored_pages(k: Tensor, kind: str) -> tuple[StoredKV, Tensor]:
    """Pages of a kind, and the keys that they stand for."""
    if kind in CODES:
        stored = quantize(k, k, CODES[kind])
        assert stored.scales is not None
        return stored, stored.k.float() * read_scales(stored.scales)[..., :1]
    k = k.to(DTYPES[kind])
    return StoredKV(k, k, None), k.float()


@pytest.mark.parametrize(
    ("rows", "heads", "dim", "dtype", "kind"),
    [
        *((2, 1, 24, dtype, kind) for dtype in ("fp32", "bf16") for kind in (*DTYPES, *CODES)),
        (1, 2, 24, "bf16", "bf16"),
        (4, 1, 24, "fp32", "float8_e4m3fn"),
        (2, 1, 136, "bf16", "bf16"),
    ],
)
def test_tail_pages_are_scored_exactly(
    impl: str, rows: int, heads: int, dim: int, dtype: str, kind: str
) -> None:
    torch.manual_seed(2)
    kv_heads, size, batch = 2, 6, 3
    stored, keys = stored_pages(torch.randn(20, heads, size, dim), kind)
    pages = torch.randperm(20)[: batch * rows].int()
    lens = torch.tensor([6, 1, 0], dtype=torch.int32).repeat_interleave(rows)
    if rows == 4:
        # The rows of a KV head's queries have the same tokens.
        pages = pages.view(batch, 2, 2)[..., :1].expand(-1, -1, 2).flatten()
    layout = SketchLayout(dim, size, 5)
    sketches = torch.zeros(4, kv_heads, layout.num_bytes, dtype=torch.uint8)
    query = torch.randn(batch, 4, dim).to(DTYPES[dtype])
    table = torch.ones(batch, 3, dtype=torch.int32)
    tail = TailPages(stored, pages, lens)
    given = (query, sketches, table, table[:, 0], layout)
    scores, lse = sketch_score(*given, scale=SCALE, tail=tail, impl=impl)
    alone, _ = sketch_score(*given, scale=SCALE, impl=impl)
    assert_close(scores[..., :1], alone[..., :1], rtol=0, atol=0)
    own = keys[pages.long()].view(batch, rows * heads, size, dim)
    own = own.repeat_interleave(4 // own.shape[1], dim=1).double()
    logits = torch.einsum("bhd,bhsd->bhs", SCALE * query.double(), own)
    absent = torch.arange(size) >= lens.view(batch, rows)[:, :1, None]
    expected = logits.masked_fill(absent, -torch.inf).logsumexp(-1)
    assert_close(lse.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_tail_without_full_pages(impl: str) -> None:
    stored, keys = stored_pages(torch.randn(3, 1, 4, 16), "fp32")
    one = torch.ones(1, dtype=torch.int32)
    layout = SketchLayout(16, 4, 3)
    sketches = torch.zeros(4, 1, layout.num_bytes, dtype=torch.uint8)
    query = torch.randn(1, 2, 16)
    scores, lse = sketch_score(
        query,
        sketches,
        one[:, None][:, :0],
        one * 0,
        layout,
        tail=TailPages(stored, one, one),
        impl=impl,
    )
    assert scores.shape == (1, 2, 0)
    assert_close(lse, query[:, :] @ keys[1, 0, 0])
