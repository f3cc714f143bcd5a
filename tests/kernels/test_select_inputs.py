"""What ``select`` takes beside dense float32 scores of a few pages: dtypes, strides, many pages."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hisparse.kernels import SelectRule, select
from hisparse.types import Selection
from tests.kernels.world import i32

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)


def all_values(dtype: torch.dtype) -> Tensor:
    """Every value that 16 bits can have, infinities and NaN too; float32 takes those of float16."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.float16 if dtype == torch.float32 else dtype).to(dtype)


@DTYPES
def test_scores_of_any_dtype_are_compared_as_they_are(impl: str, dtype: torch.dtype) -> None:
    """All values, in random order; all that are chosen are as large as any that is not."""
    generator = torch.Generator().manual_seed(1)
    scores = all_values(dtype)[torch.randperm(2**16, generator=generator)][None, None]
    counter, total = torch.tensor([0]), i32([2**16])
    for most in (5, 2**15 + 700):
        rule = SelectRule(heads=1, max_pages=most, invalid_scores=counter)
        got, want = (select(scores, total, rule, impl=name) for name in (impl, "reference"))
        assert torch.equal(got.pages, want.pages)
        assert torch.equal(got.lengths, want.lengths)
    assert counter.tolist() == [4]


@pytest.mark.parametrize("heads", [1, 3], ids=lambda h: f"select{h}")
def test_any_number_of_pages_that_blocks_share(impl: str, heads: int) -> None:
    """Few values, so that equal scores lie in all blocks; some blocks have no page."""
    generator = torch.Generator().manual_seed(heads)
    counts, most = [2500, 2049, 33, 1000, 24, 23], 24
    scores = torch.randint(9, (len(counts), heads, 2500), generator=generator).float() ** 2
    forced = torch.rand(len(counts), 2500, generator=generator) < 0.002
    for last in (False, True):
        rule = SelectRule(heads=heads, max_pages=most, drop_last=last)
        got = select(scores, i32(counts), rule, forced=forced, impl=impl)
        for (row, count), head in itertools.product(enumerate(counts), range(heads)):
            values = scores[row, head].masked_fill(forced[row], torch.inf)[:count].tolist()
            best = sorted(range(count), key=lambda page: (-values[page], page))[:most]
            kept = sorted(page for page in best if not last or page != count - 1)
            assert got.pages[row, head].tolist() == kept + [-1] * (most - len(kept))
            assert got.lengths[row, head] == len(kept)


@DTYPES
def test_scores_may_have_any_strides(impl: str, dtype: torch.dtype) -> None:
    """As a part of the buffer of another kernel, or with its dimensions in another order."""
    torch.manual_seed(0)
    memory = torch.randn(60, 3, 9, dtype=torch.float32).to(dtype)
    scores = memory.permute(1, 2, 0)[:, 1:, ::2]
    num_pages, rest = i32([30, 17, 4]), torch.randn(8, 3).t()
    forced = (torch.rand(30, 3) < 0.1).t()
    for heads in (2, 16):
        rule = SelectRule(heads=heads, max_pages=7)
        got = select(scores, num_pages, rule, forced=forced, rest=rest, impl=impl)
        dense = (x.contiguous() for x in (scores.float(), forced, rest))
        want = select(next(dense), num_pages, rule, forced=next(dense), rest=next(dense))
        assert torch.equal(got.pages, want.pages)
        assert torch.equal(got.lengths, want.lengths)


@pytest.mark.parametrize("rule", [{}, {"within": 3.0}], ids=["top", "near"])
def test_the_last_page_is_ranked_and_left_out(impl: str, rule: dict[str, float]) -> None:
    """Where it is among the best, the selection is one page shorter."""
    torch.manual_seed(0)
    num_pages = i32([0, 1, 2, 5, 6, 30, 30])
    scores = torch.randn(7, 2, 30)
    scores[5, :, 29], scores[6, :, 29] = 9.0, -9.0
    whole = select(scores, num_pages, SelectRule(heads=2, max_pages=5, **rule))
    pages, lengths = select(
        scores, num_pages, SelectRule(heads=2, max_pages=5, drop_last=True, **rule), impl=impl
    )
    for row, count in enumerate(num_pages.tolist()):
        for head in range(2):
            chosen = [x for x in whole.pages[row, head].tolist() if x not in (-1, count - 1)]
            assert pages[row, head].tolist() == chosen + [-1] * (5 - len(chosen))
            assert lengths[row, head] == len(chosen)
    assert (whole.lengths[5] - lengths[5]).tolist() == [1, 1]
    assert torch.equal(whole.lengths[6], lengths[6])


def assert_best(got: Selection, shares: Tensor, most: int) -> None:
    """``shares [H, P] float64``: no page that is left out has a larger share, but for rounding."""
    for pages, length, share in zip(got.pages[0], got.lengths[0], shares, strict=True):
        chosen = pages.long()
        assert int(length) == most
        assert (chosen[1:] > chosen[:-1]).all()
        left_out = share.clone()
        left_out[chosen] = 0
        assert share[chosen].min() >= left_out.max() * (1 - 1e-5)


@pytest.mark.parametrize("group", [4, 11])
def test_heads_agree_on_8192_pages(impl: str, group: int) -> None:
    torch.manual_seed(0)
    scores, rest = 4 * torch.randn(1, 2 * group, 8200), torch.randn(1, 2 * group)
    rule = SelectRule(heads=2, max_pages=127)
    got = select(scores, i32([8192]), rule, rest=rest, impl=impl)
    logits = torch.cat([scores[0, :, :8192], rest[0, :, None]], -1).double()
    assert_best(got, logits.softmax(-1)[:, :-1].unflatten(0, (2, group)).sum(1), 127)


def test_one_head_of_131072_pages(impl: str) -> None:
    """With a tie at the last place: quarters of a unit."""
    torch.manual_seed(0)
    scores = (torch.randn(1, 1, 2**17) * 4).round() / 4
    rule = SelectRule(heads=1, max_pages=2048, drop_last=True)
    got, want = (select(scores, i32([2**17]), rule, impl=name) for name in (impl, "reference"))
    assert torch.equal(got.pages, want.pages)
    assert torch.equal(got.lengths, want.lengths)


def test_pages_whose_share_is_lost_to_rounding_tie(impl: str) -> None:
    """One page has the whole softmax of both heads: of the others, all 0, the first are taken."""
    scores = torch.zeros(1, 2, 500)
    scores[:, :, 300] = 1e4
    pages, _ = select(scores, i32([500]), SelectRule(heads=1, max_pages=5), impl=impl)
    assert pages.tolist() == [[[0, 1, 2, 3, 300]]]
