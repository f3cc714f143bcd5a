"""The example plug-in of LOCKS, against plain reckoning by single numbers, at every rank."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hisparse.algorithms import ALGORITHMS, entry_bytes
from hisparse.testing import Case, cases_of, run_checks
from tests.sizes import SWEEPS

FOLDER = Path(__file__).parents[2] / "examples" / "hisparse-locks"
PAGES, SIZE, HEADS, DIM, GROUP = 3, 16, 2, 32, 3


@pytest.fixture(scope="module")
def locks() -> Iterator[Any]:
    """The module of the plug-in; what it registers is forgotten again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ALGORITHMS, "_entries", dict(ALGORITHMS._entries))
        patch.syspath_prepend(FOLDER)
        yield import_module("hisparse_locks")
        del sys.modules["hisparse_locks"]


def keys(seed: int = 0) -> Tensor:
    """``[P, S, Hkv, D]`` with channels of other ranges and a mean, as real keys have."""
    made = torch.Generator().manual_seed(seed)
    spread = torch.rand(DIM, generator=made) ** 3 + 0.01
    mean = 4 * torch.randn(PAGES, 1, HEADS, DIM, generator=made)
    return mean + spread * torch.randn(PAGES, SIZE, HEADS, DIM, generator=made)


def decoded(summary: Any, page: int, head: int) -> np.ndarray:
    """The keys ``[S, D]`` of one page and head, one number at a time."""
    basis, basis_scale, weights, weights_scale, mean, mean_scale = (
        x[page, head].tolist() for x in summary
    )
    found = np.zeros((SIZE, DIM))
    for token in range(SIZE):
        for channel in range(DIM):
            value = mean[channel] * mean_scale
            for direction, row in enumerate(basis):
                code = row[channel // 2] >> 4 * (channel % 2) & 15
                signed = code - 16 if code > 7 else code
                scale = weights_scale[token] * basis_scale[direction]
                value += signed * weights[token][direction] * scale
            found[token, channel] = value
    return found


@pytest.mark.parametrize("rank", range(1, SIZE))
def test_a_summary_is_the_nearest_of_its_rank(locks: Any, rank: int) -> None:
    pages = keys(rank)
    summary = locks.make_summary(pages, rank)
    for page, head in ((0, 0), (2, 1)):
        exact = pages[page, :, head].double().numpy()
        centred = exact - exact.mean(0)
        squares = np.linalg.svd(centred, compute_uv=False) ** 2
        error = ((decoded(summary, page, head) - exact) ** 2).sum()
        # A step of four bits is a 7th of a direction's largest entry: an error of a few percent.
        coded = 0.06 * squares[:rank].sum()
        assert squares[rank:].sum() * 0.999 - 1e-9 <= error <= squares[rank:].sum() + coded


@pytest.mark.parametrize("rank", [1, 4, 8, 15])
def test_scores_are_the_log_sum_exp_of_the_decoded_keys(locks: Any, rank: int) -> None:
    summary = locks.make_summary(keys().bfloat16(), rank)
    table = torch.tensor([[2, 0], [1, 1]])
    # Multiples of a 127th of the largest number, so that eight bits hold them.
    query = torch.randint(-127, 128, (2, HEADS * GROUP, DIM)) / 127.0
    query[..., 0] = 1.0
    scores = locks.approximate_scores(query, locks.Summary(*(x[table] for x in summary)), 0.25)
    assert scores.shape == (2, HEADS * GROUP, 2)
    for request, head, place in ((0, 0, 0), (0, 5, 1), (1, 3, 0)):
        page = decoded(summary, int(table[request, place]), head // GROUP)
        logits = 0.25 * page @ query[request, head].double().numpy()
        expected = math.log(np.exp(logits).sum())
        assert float(scores[request, head, place]) == pytest.approx(expected, abs=1e-4)


def test_queries_are_rounded_to_eight_bits(locks: Any) -> None:
    summary = locks.Summary(*(x[None] for x in locks.make_summary(keys(), 4)))
    query = torch.zeros(1, HEADS * GROUP, DIM)
    query[..., 0], query[..., 1] = 127.0, 0.6
    rounded = query.round()
    scores, expected = (locks.approximate_scores(x, summary, 0.1) for x in (query, rounded))
    assert torch.equal(scores, expected)


def test_heads_that_share_a_selection_add_their_shares(locks: Any) -> None:
    scores = torch.randn(2, HEADS * GROUP, 5)
    kept = torch.tensor([[True, False, False, False, True], [True] * 5])
    found = locks.sum_of_heads(scores, kept, HEADS)
    for head in range(HEADS):
        group = scores[0, head * GROUP : (head + 1) * GROUP].tolist()
        for page in (1, 2, 3):
            expected = math.log(sum(math.exp(s[page] - max(s[1:4])) for s in group))
            assert float(found[0, head, page]) == pytest.approx(expected, abs=1e-5)
    assert (found[0, :, [0, 4]] == -torch.inf).all() and (found[1] == -torch.inf).all()


def test_a_page_of_one_key_is_its_mean(locks: Any) -> None:
    """For some of these LAPACK finds no eigenvectors."""
    pages = torch.randn(64, 1, HEADS, DIM).expand(64, SIZE, HEADS, DIM)
    summary = locks.make_summary(pages, 8)
    assert all(x.float().isfinite().all() for x in summary)
    mean = summary.mean * summary.mean_scale.float()[..., None]
    assert (mean - pages[:, 0]).abs().max() <= pages.abs().max() / 127


@pytest.mark.parametrize("rank", [2, 4, 8, 15, 40])
def test_bytes_are_as_the_class_says(locks: Any, rank: int) -> None:
    algorithm = locks.Locks(rank=rank)
    case = Case.of(lambda: algorithm, "kv_head", SIZE)
    policy = case.start().sim.policy
    kept, dim = min(rank, SIZE - 1), policy.kv.head_dim
    page = (dim // 2 + SIZE + 2) * kept + dim + 2 * SIZE + 2
    kinds = algorithm.representations(policy)
    assert entry_bytes(kinds, "page") == policy.kv.num_kv_heads * page
    with pytest.raises(ValueError, match="rank: got 0, expected at least 1"):
        locks.Locks(rank=0)


@pytest.mark.sweeps
@pytest.mark.parametrize(("rank", "vote"), [(8, "locks"), (2, "softmax")][: 1 + SWEEPS])
def test_contract(locks: Any, rank: int, vote: str) -> None:
    """One case in `make test`."""

    def make() -> Any:
        return locks.Locks(rank=rank, vote=vote)

    cases = cases_of(make) if SWEEPS else [Case.of(make, "kv_head", 8)]
    assert [r for r in run_checks(make, cases) if r.status != "passed"] == []
