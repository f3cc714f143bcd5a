"""``select`` is right without much shared memory, without clusters, and with wrong counts."""

from __future__ import annotations

import pytest
import torch

from hisparse.kernels import SelectRule, select
from hisparse.kernels.build import cuda as _build_cuda
from tests.kernels.world import i32


def test_shares_of_more_pages_than_shared_memory_holds_use_scratch(fibers: str) -> None:
    torch.manual_seed(0)
    scores = torch.randn(3, 22, 300)
    num_pages, rule = i32([300, 170, 5]), SelectRule(heads=2, max_pages=9)
    inside = select(scores, num_pages, rule, impl=fibers)
    assert _build_cuda.call_cuda("select_scratch_words", scores, -1.0, 2) == 0
    _build_cuda.call_cuda("set_shared_limit", 1024)
    try:
        assert _build_cuda.call_cuda("select_scratch_words", scores, -1.0, 2) == 300
        outside = select(scores, num_pages, rule, impl=fibers)
        # A head that selects for itself needs none: its scores are read again.
        assert _build_cuda.call_cuda("select_scratch_words", scores, -1.0, 22) == 0
        alone = SelectRule(heads=22, max_pages=9)
        near, forced = SelectRule(heads=22, max_pages=9, within=1.0), torch.rand(3, 300) < 0.02
        # But for distances from its best score.
        assert _build_cuda.call_cuda("select_scratch_words", scores, 1.0, 22) == 300
        got, want = (
            [select(scores, num_pages, x, forced=forced, impl=name).pages for x in (alone, near)]
            for name in (fibers, "reference")
        )
    finally:
        _build_cuda.call_cuda("set_shared_limit", -1)
    assert torch.equal(inside.pages, outside.pages)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("within", [None, 0.5], ids=["top", "near"])
@pytest.mark.parametrize("blocks", [1, 2])
def test_a_device_may_have_no_place_for_a_cluster(
    fibers: str, blocks: int, within: float | None
) -> None:
    """A GPU before sm_90, or a small part of one: it refuses the launch of a larger cluster."""
    torch.manual_seed(0)
    scores, num_pages = torch.randn(2, 3, 2500), i32([2500, 1700])
    rule = SelectRule(heads=1, max_pages=40, within=within)
    want = select(scores, num_pages, rule, impl=fibers)
    assert (int(want.lengths.min()) < 40) == (within is not None)
    _build_cuda.call_cuda("set_max_cluster", blocks)
    try:
        got = select(scores, num_pages, rule, impl=fibers)
    finally:
        _build_cuda.call_cuda("set_max_cluster", -1)
    assert torch.equal(got.pages, want.pages)


@pytest.mark.parametrize("count", [-1, -(2**31), 41, 2**31 - 1])
def test_a_count_beyond_the_scores_reads_nothing_there(unverified: str, count: int) -> None:
    """As 0 or as all pages."""
    rule = SelectRule(heads=1, max_pages=3)
    scores = torch.arange(40.0).repeat(1, 2, 1)
    pages, lengths = select(scores, i32([count]), rule, impl=unverified)
    assert pages.tolist() == [[[-1] * 3 if count < 0 else [37, 38, 39]]]
    assert lengths.tolist() == [[0 if count < 0 else 3]]
