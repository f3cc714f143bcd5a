"""Scores from queries as the model gives them: ``page_score``, and tail pages."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hisparse.kernels import (
    QUANTIZED,
    NewTokens,
    SketchLayout,
    TailPages,
    append_tokens,
    page_score,
    page_summary,
    quantize,
    sketch_score,
)
from hisparse.kernels.quantize.reference import read_scales
from hisparse.types import StoredKV
from tests.kernels.conftest import check_unwritten

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALE = 0.3


def read_as_bytes(module: str, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPUs before compute capability 8.9 read e4m3."""
    if impl not in ("reference", "cpu"):
        own = importlib.import_module(f"hisparse.kernels.{module}.triton")
        monkeypatch.setattr(own, "reads_e4m3", lambda device: False)


@pytest.mark.parametrize(
    ("batch", "q_heads", "kv_heads", "dim", "ranges", "pages", "dtype", "stored"),
    [
        *((3, 9, 3, 24, 2, 81, x, kind) for x in DTYPES for kind in ("fp32", "bf16", "fp8")),
        (3, 4, 2, 24, 2, 81, "bf16", "fp8-bytes"),
        (3, 12, 1, 160, 2, 81, "bf16", "fp8"),
        (3, 12, 1, 160, 2, 81, "fp32", "bf16"),
        (1, 9, 3, 64, 1, 448, "fp32", "fp32"),
        (3, 4, 2, 24, 4, 7, "fp32", "fp8"),
        (2, 2, 2, 5, 3, 1, "fp32", "bf16"),
        (8, 8, 1, 128, 2, 63, "fp32", "fp8"),
    ],
)
def test_page_scores_are_those_of_the_scaled_query(
    impl: str,
    batch: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    ranges: int,
    pages: int,
    dtype: str,
    stored: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The largest sum of channel maxima, to float32's rounding of terms of any size."""
    if stored == "fp8-bytes":
        read_as_bytes("summary", impl, monkeypatch)
        stored = "fp8"
    torch.manual_seed(0)
    spread = torch.logspace(-3, 2, dim)
    query = (torch.randn(batch, q_heads, 2, dim) / spread).to(DTYPES[dtype])[:, :, 1]
    keys = torch.randn(140, 4 * ranges, kv_heads, dim) * spread
    to = torch.float8_e4m3fn if stored == "fp8" else DTYPES[stored]
    summaries = torch.zeros(140, ranges, kv_heads, 2 * dim, dtype=to)
    scales = torch.zeros(140, ranges, kv_heads) if stored == "fp8" else None
    page_summary(keys, summaries, torch.arange(140), scales=scales, impl="reference")
    # The table is a part of a wider one, as the coordinator hands it over.
    table = torch.randint(140, (batch, pages + 3), dtype=torch.int32)[:, :pages]
    num_pages = torch.tensor([pages, 3, 0] + [pages] * batch, dtype=torch.int32)[:batch]
    num_pages = num_pages.clamp(max=pages)
    scores = page_score(query, summaries, table, num_pages, scales=scales, scale=SCALE, impl=impl)
    own = summaries.double() if scales is None else summaries.double() * scales[..., None]
    high, low = own[table.long()].repeat_interleave(q_heads // kv_heads, dim=3).chunk(2, -1)
    q = SCALE * query.double()[:, None, None]
    expected = torch.maximum(q * high, q * low).sum(-1).amax(2).transpose(1, 2)
    size = torch.maximum((q * high).abs(), (q * low).abs()).sum(-1).amax(2).transpose(1, 2)
    present = (torch.arange(pages) < num_pages[:, None])[:, None].expand_as(scores)
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
    layout = SketchLayout(dim, size, 5, impl != "cpu")
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


def new_tokens(rows: int, dim: int, dtype: torch.dtype, *, within: bool) -> TailPages:
    """A new token of each of three requests with two KV heads; values may lie within keys."""
    torch.manual_seed(2)
    size, heads, pools = 6, 2 if rows == 1 else 1, []
    for count, held in ((20, heads), (9, 2)):
        # Heads of a token lie side by side.
        k, v = (torch.randn(count, size, held, x).to(dtype).transpose(1, 2) for x in (dim, 8))
        pools.append(StoredKV(k, k[..., :8] if within else v))
    lens = torch.tensor([6, 1, 3], dtype=torch.int32).repeat_interleave(rows)
    pages = torch.randperm(20)[: 3 * rows].int()
    k, v = (torch.randn(3, 2, 2, x).to(dtype)[:, 1] for x in (dim, 8))
    slots = torch.tensor([5, 20, 53]), pages.long() * size + lens - 1
    new = NewTokens(k, k[..., :8] if within else v, pools[1], *slots)
    return TailPages(pools[0], pages, lens, new)


def scored_with(tail: TailPages, impl: str) -> list[Tensor]:
    """The new tokens' pools and the scores, of one page without detail and of the tails."""
    assert tail.new is not None
    size, dim = tail.kv.k.shape[2:]
    layout = SketchLayout(dim, size, 5, impl != "cpu")
    sketches = torch.zeros(4, 2, layout.num_bytes, dtype=torch.uint8)
    one = torch.ones(3, 1, dtype=torch.int32)
    torch.manual_seed(3)
    query = torch.randn(3, 4, dim).to(tail.kv.k.dtype)
    scores, lse = sketch_score(
        query, sketches, one, one[:, 0], layout, scale=SCALE, tail=tail, impl=impl
    )
    assert lse is not None
    return [*tail.kv.kv, *tail.new.host.kv, scores, lse]


@pytest.mark.parametrize("within", [False, True], ids=["values", "latents"])
@pytest.mark.parametrize(
    ("rows", "dim", "kind"),
    [(2, 24, "bf16"), (1, 24, "bf16"), (4, 24, "fp32"), (2, 17, "fp16"), (1, 136, "bf16")],
)
def test_new_tokens_are_written_and_scored(
    impl: str, rows: int, dim: int, kind: str, within: bool
) -> None:
    """As if ``append_tokens`` had written them: the same bits in both pools and in the scores."""
    tails = [new_tokens(rows, dim, DTYPES[kind], within=within) for _ in range(2)]
    k, v, host, host_slots, tail_slots = tails[0].new or ()
    append_tokens(k, v, host, host_slots, tails[0].kv, tail_slots, impl="reference")
    if rows == 4:
        # The first row of a KV head is scored: the others have the same tokens elsewhere.
        assert len(set(tail_slots.tolist())) == 12
    for one, other in zip(*(scored_with(x, impl) for x in tails), strict=True):
        assert torch.equal(one, other)


def test_new_tokens_beyond_the_pools_are_not_written(unverified: str) -> None:
    tail = new_tokens(2, 24, torch.bfloat16, within=False)
    assert tail.new is not None
    nowhere = torch.tensor([54, -1, 60]), torch.full((6,), 120)
    tail = tail._replace(new=tail.new._replace(host_slots=nowhere[0], tail_slots=nowhere[1]))
    before = [x.clone() for x in (*tail.kv.kv, *tail.new.host.kv)]
    assert all(map(torch.equal, before, scored_with(tail, unverified)))


def test_a_tail_without_full_pages(impl: str) -> None:
    stored, keys = stored_pages(torch.randn(3, 1, 4, 16), "fp32")
    one = torch.ones(1, dtype=torch.int32)
    layout = SketchLayout(16, 4, 3, impl != "cpu")
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
