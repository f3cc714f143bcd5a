"""Counts, lengths and pages that no tensor has: an error on a CPU, the nearest on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from hisparse.errors import KernelError
from hisparse.kernels import (
    LatentRow,
    SelectRule,
    SketchLayout,
    TailPages,
    chunk_index_score,
    decode_latents,
    encode_latents,
    index_score,
    outline_bytes,
    outline_score,
    page_score,
    page_sketch,
    paged_attention,
    select,
    sketch_score,
)
from hisparse.types import IndexerInputs, PagedKV, StoredKV
from tests.kernels.conftest import check_unwritten
from tests.kernels.world import i32

#: Of three pages each, in tensors of nine.
TABLE, BEYOND, NEAREST = ([[3, *pages], [2, 5, 6]] for pages in ([1, 7], [12, -2], [8, 0]))
LATENT = LatentRow(64, 16)
TAILS, TAIL_LENS = i32([3, 1]), i32([4, 2])


def present(impl: str, scores: Tensor, counts: Tensor) -> Tensor:
    """The scores of pages that are there; no other row has got any."""
    absent = torch.arange(scores.shape[-1]) >= counts[:, None]
    absent = absent[:, None].expand_as(scores)
    check_unwritten(impl, scores, absent)
    return scores[~absent]


def score(kind: str, impl: str, table: Any = TABLE, counts: Any = (3, 0)) -> list[Tensor]:
    query, table, counts = torch.randn(2, 4, 16), i32(table), i32(counts)
    if kind == "page_score":
        scores = page_score(query, torch.randn(9, 1, 2, 32), table, counts, impl=impl)
    elif kind == "outline_score":
        outlines = torch.randint(100, (9, 2, outline_bytes(16))).byte()
        scores = outline_score(query, outlines, table, counts, impl=impl)
    else:
        layout = SketchLayout(16, 4, 5, impl != "cpu")
        keys, sketches = torch.randn(9, 4, 2, 16), torch.zeros(9, 2, layout.num_bytes).byte()
        page_sketch(keys, sketches, torch.arange(9), layout, impl="reference")
        scores, _ = sketch_score(query, sketches, table, counts, layout, impl=impl)
    return [present(impl, scores, counts)]


def tail(impl: str, pages: Tensor = TAILS, lens: Tensor = TAIL_LENS) -> list[Tensor | None]:
    layout = SketchLayout(16, 4, 5, impl != "cpu")
    query, sketches = torch.randn(2, 4, 16), torch.zeros(1, 2, layout.num_bytes).byte()
    pool = StoredKV(torch.randn(9, 2, 4, 16), torch.randn(9, 2, 4, 16), None)
    none = torch.zeros(2, 0, dtype=torch.int32)
    tails = TailPages(pool, pages, lens)
    counts = i32([0, 0])
    return [sketch_score(query, sketches, none, counts, layout, tail=tails, impl=impl)[1]]


def index(impl: str, table: Any = TABLE, counts: Any = (2, 0)) -> list[Tensor]:
    new = IndexerInputs(torch.randn(2, 3, 16), torch.randn(2, 16), torch.randn(2, 3))
    counts = i32(counts)
    scores = index_score(new, torch.randn(9, 16), i32(table), counts, impl=impl)
    return [present(impl, scores, counts + 1)]


def chunk_index(impl: str, table: Any = TABLE, counts: Any = (3, 1)) -> list[Tensor]:
    new = IndexerInputs(torch.randn(2, 3, 16), torch.randn(2, 16), torch.randn(2, 3))
    keys = torch.randn(9, 16)
    scores = chunk_index_score(new, keys, i32(table[0]), i32(counts), impl=impl)
    return [scores[0], scores[1, :, :1]]


def attend(impl: str, table: Any = TABLE, lens: Any = (11, 5)) -> list[Tensor]:
    kv = PagedKV(torch.randn(9, 2, 4, 16), torch.randn(9, 2, 4, 16))
    return [*paged_attention(torch.randn(2, 4, 16), kv, i32(table), i32(lens), impl=impl)]


def decode(impl: str, table: Any = (1, 2)) -> list[Tensor]:
    out = torch.ones(2, 4, LATENT.width)
    pages = encode_latents(torch.randn(9, 4, LATENT.width), LATENT, impl="reference")
    decode_latents(pages, i32(table), LATENT, out, impl=impl)
    return [out]


def choose(impl: str, counts: Any = (6, 4), **rule: Any) -> list[Tensor]:
    scores, invalid = torch.randn(2, 4, 6), torch.zeros(1, dtype=torch.int64)
    scores[0, 0, 1] = torch.nan
    asked = SelectRule(heads=2, max_pages=5, invalid_scores=invalid, **rule)
    return [*select(scores, i32(counts), asked, impl=impl), invalid]


#: What is called, what a tensor does not have, and the nearest that it has.
CASES: dict[str, tuple[Callable[..., list[Any]], dict[str, Any], dict[str, Any]]] = {
    **{
        f"{name}-{what}": (partial(score, name), *change)
        for name in ("page_score", "outline_score", "sketch_score")
        for what, change in {
            "counts": ({"counts": [5, -1]}, {"counts": [3, 0]}),
            "pages": ({"table": BEYOND}, {"table": NEAREST}),
        }.items()
    },
    "sketch_score-tails": (tail, {"pages": i32([12, -1])}, {"pages": i32([8, 0])}),
    "sketch_score-lens": (tail, {"lens": i32([9, -1])}, {"lens": i32([4, 0])}),
    "index_score-pages": (index, {"table": BEYOND, "counts": [2, 0]},
                          {"table": NEAREST, "counts": [2, 0]}),
    "chunk_index_score-counts": (chunk_index, {"counts": [9, 1]}, {"counts": [3, 1]}),
    "chunk_index_score-pages": (chunk_index, {"table": BEYOND}, {"table": NEAREST}),
    "paged_attention-pages": (attend, {"table": BEYOND}, {"table": NEAREST}),
    "paged_attention-lens": (attend, {"lens": [99, -1]}, {"lens": [12, 0]}),
    "decode_latents-pages": (decode, {"table": [1, 12]}, {"table": [1, -1]}),
    **{
        f"select-{name}": (partial(choose, **rule), {"counts": [9, -3]}, {"counts": [6, 0]})
        for name, rule in {
            "length": {},
            "drop_last": {"drop_last": True},
            "within": {"within": 1.0, "drop_last": True},
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_there_is_refused_or_taken_as_the_nearest(impl: str, name: str) -> None:
    call, beyond, nearest = CASES[name]
    torch.manual_seed(0)
    try:
        found = call(impl, **beyond)
    except (KernelError, IndexError, RuntimeError) as error:
        assert impl in ("reference", "cpu"), "a GPU would have to wait"
        message = str(error) if isinstance(error, KernelError) else ""
        assert not message or re.match(r"[\w.]+: got (-\d+|9|12|99)\b.*, expected ", message)
        return
    torch.manual_seed(0)
    assert_close(found, call(impl, **nearest), rtol=0, atol=0)
