"""``page_score`` and ``select`` of every implementation."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from hisparse.errors import KernelError
from hisparse.kernels import page_score, select


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("batch", "q_heads", "kv_heads", "dim", "pages"),
    [(1, 9, 3, 64, 448), (3, 4, 2, 24, 7), (2, 2, 2, 5, 1), (8, 8, 1, 128, 63)],
)
def test_page_score_is_the_sum_of_channel_maxima(
    impl: str, dtype: torch.dtype, batch: int, q_heads: int, kv_heads: int, dim: int, pages: int
) -> None:
    query = torch.randn(batch, q_heads, dim)
    keys = torch.randn(2, 700, kv_heads, dim)
    high, low = keys.amax(0), keys.amin(0)
    summaries = torch.cat([high, low], -1).to(dtype)
    # The table is a part of a wider one, as the coordinator hands it over.
    table = torch.randint(700, (batch, pages + 3), dtype=torch.int32)[:, :pages]
    num_pages = torch.randint(pages + 1, (batch,), dtype=torch.int32)
    num_pages[0] = pages
    scores = page_score(query, summaries, table, num_pages, impl=impl)
    own = summaries[table.long()].float().repeat_interleave(q_heads // kv_heads, dim=2)
    products = torch.maximum(query[:, None] * own[..., :dim], query[:, None] * own[..., dim:])
    expected = products.sum(-1).transpose(1, 2)
    absent = torch.arange(pages) >= num_pages[:, None]
    assert_close(scores, expected.masked_fill(absent[:, None], -torch.inf), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", [1, 2, 4, 8], ids=lambda h: f"select{h}")
@pytest.mark.parametrize("width", [1, 6, 9, 64])
def test_select_takes_sinks_recents_and_the_best(impl: str, heads: int, width: int) -> None:
    num_pages = torch.tensor([0, 1, width // 2, width], dtype=torch.int32)
    scores = torch.randn(4, 4, width)
    beyond = torch.arange(width) >= num_pages[:, None]
    scores = scores.masked_fill(beyond[:, None], torch.nan)
    pages, lengths = select(
        scores, num_pages, heads=heads, max_pages=5, num_sinks=1, num_recents=2, impl=impl
    )
    assert pages.shape == (4, heads, 5)
    for row, count in enumerate(num_pages.tolist()):
        for head in range(heads):
            if heads >= 4:
                share = scores[row, head * 4 // heads, :count]
            else:
                group = scores[row, head * 4 // heads : (head + 1) * 4 // heads, :count]
                share = group.softmax(-1).sum(0)
            forced = {0, count - 2, count - 1} if count > 5 else set(range(count))
            ranked = [p for p in share.argsort(descending=True).tolist() if p not in forced]
            expected = sorted([*forced, *ranked][: min(5, count)])
            assert lengths[row, head] == len(expected)
            assert pages[row, head].tolist() == expected + [-1] * (5 - len(expected))


def test_heads_vote_with_their_softmax_not_with_raw_logits(impl: str) -> None:
    """Head 0 has high logits everywhere; head 1 has one peak that must win over them."""
    scores = torch.zeros(1, 2, 6)
    scores[0, 0] = torch.tensor([50.0, 50.1, 50.2, 50.0, 50.1, 50.0])
    scores[0, 1] = torch.tensor([0.0, 0.0, 0.0, 9.0, 0.0, 0.0])
    six = torch.tensor([6], dtype=torch.int32)
    pages, _ = select(scores, six, heads=1, max_pages=1, num_sinks=0, num_recents=0, impl=impl)
    assert pages.tolist() == [[[3]]]


def test_bad_tensors_are_named(impl: str) -> None:
    three = torch.tensor([3], dtype=torch.int32)
    with pytest.raises(KernelError, match=r"scores: got 3 heads, expected a multiple or a divisor"):
        select(
            torch.zeros(1, 3, 4), three, heads=2, max_pages=2, num_sinks=0, num_recents=0, impl=impl
        )
    with pytest.raises(KernelError, match=r"summaries: got shape \[9, 1, 8\]"):
        page_score(torch.zeros(1, 2, 8), torch.zeros(9, 1, 8), three[None], three, impl=impl)
