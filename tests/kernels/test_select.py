"""``select`` of every implementation."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels import SelectRule, select


def sinks_and_recents(num_pages: Tensor, width: int) -> Tensor:
    """``[B, P] bool``, the first page and the last two pages of each request."""
    page = torch.arange(width)
    return (page == 0) | (page >= num_pages[:, None] - 2)


@pytest.mark.parametrize("heads", [1, 2, 4, 8], ids=lambda h: f"select{h}")
@pytest.mark.parametrize("width", [1, 6, 9, 64])
def test_select_takes_forced_pages_and_the_best(impl: str, heads: int, width: int) -> None:
    num_pages = torch.tensor([0, 1, width // 2, width], dtype=torch.int32)
    scores = torch.randn(4, 4, width)
    beyond = torch.arange(width) >= num_pages[:, None]
    scores = scores.masked_fill(beyond[:, None], torch.nan)
    rule = SelectRule(heads=heads, max_pages=5)
    forced_pages = sinks_and_recents(num_pages, width)
    pages, lengths = select(scores, num_pages, rule, forced=forced_pages, impl=impl)
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
    pages, _ = select(scores, six, SelectRule(heads=1, max_pages=1), impl=impl)
    assert pages.tolist() == [[[3]]]


def random_scores(given: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores with NaN where there is no page, counts, and scores of the rest."""
    num_pages = torch.tensor([0, 1, 4, width // 2, width], dtype=torch.int32)
    scores = 3 * torch.randn(5, given, width)
    beyond = torch.arange(width) >= num_pages[:, None]
    return scores.masked_fill(beyond[:, None], torch.nan), num_pages, 3 * torch.randn(5, given)


def group_of(x: Tensor, head: int, heads: int) -> Tensor:
    """The given heads ``[heads', ...]`` that the selection head stands for."""
    given = x.shape[0]
    return x[head * given // heads : max(head * given // heads + 1, (head + 1) * given // heads)]


def test_a_thread_whose_first_request_has_no_page(impl: str) -> None:
    """A thread's scratch memory is empty until its first request with pages."""
    scores, none = torch.zeros(1, 2, 4), torch.zeros(1, dtype=torch.int32)
    rule = SelectRule(heads=1, max_pages=3, within=1.0)
    with ThreadPoolExecutor(1) as new_thread:
        pages, lengths = new_thread.submit(select, scores, none, rule, impl=impl).result()
    assert pages.tolist() == [[[-1, -1, -1]]]
    assert lengths.tolist() == [[0]]


@pytest.mark.parametrize("rule", [{}, {"within": 1.0}], ids=["top", "within"])
@pytest.mark.parametrize("heads", [1, 2], ids=lambda h: f"select{h}")
def test_scores_that_are_no_numbers_choose_pages_that_there_are(
    impl: str, heads: int, rule: dict[str, float]
) -> None:
    """A request whose query went wrong must not take the others down with it."""
    scores = torch.randn(2, 2, 30)
    scores[0] = torch.nan
    num_pages = torch.tensor([30, 30], dtype=torch.int32)
    limits = SelectRule(heads=heads, max_pages=6, **rule)
    forced = sinks_and_recents(num_pages, 30)
    pages, lengths = select(scores, num_pages, limits, forced=forced, impl=impl)
    alone = select(scores[1:], num_pages[1:], limits, forced=forced[1:], impl=impl)
    assert torch.equal(pages[1:], alone.pages)
    for chosen, length in zip(pages[0].tolist(), lengths[0].tolist(), strict=True):
        assert {0, 28, 29} <= set(chosen[:length]) <= set(range(30))
        assert chosen == sorted(chosen[:length]) + [-1] * (6 - length)
        assert length == len(set(chosen[:length])) == (3 if rule else 6)


def number(value: float) -> bool:
    return value == value and value < math.inf


@pytest.mark.parametrize("rule", [{}, {"within": 1.0}], ids=["top", "near"])
@pytest.mark.parametrize(
    ("heads", "given"),
    [(1, 1), (1, 4), (2, 4), (4, 4), (4, 2)],
    ids=str,
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_selections_that_a_score_may_have_spoilt_are_counted(
    impl: str, value: float, heads: int, given: int, rule: dict[str, float]
) -> None:
    """Once each, whichever of their heads it was; a place without a page does not count."""
    counter, batch, width = torch.tensor([40]), 6, 37
    limits = SelectRule(heads=heads, max_pages=6, invalid_scores=counter, **rule)
    scores = torch.randn(batch, given, width)
    num_pages = torch.tensor([37, 37, 37, 36, 6, 37], dtype=torch.int32)
    # Two of one head, one of the last head, none; one without a page; one where all are selected.
    scores[0, 0, [3, 36]] = scores[1, -1, 17] = scores[3, 0, 36] = scores[4, 0, 2] = value
    select(scores, num_pages, limits, impl=impl)
    spoilt = 0
    for row, count in enumerate(num_pages.tolist()):
        for head in range(heads):
            seen = group_of(scores[row, :, :count], head, heads).flatten().tolist()
            choice = bool(rule) or count > 6
            spoilt += choice and not all(map(number, seen))
    assert spoilt > 0 or number(value)
    assert counter.tolist() == [40 + spoilt]


@pytest.mark.parametrize("heads", [1, 2], ids=lambda h: f"select{h}")
def test_the_score_of_the_rest_counts_where_it_is_used(impl: str, heads: int) -> None:
    counter, rest = torch.tensor([0]), torch.tensor([[0.0, math.nan], [0.0, 0.0]])
    limits = SelectRule(heads=heads, max_pages=2, invalid_scores=counter)
    num_pages = torch.tensor([9, 9], dtype=torch.int32)
    select(torch.randn(2, 2, 9), num_pages, limits, rest=rest, impl=impl)
    # Two heads that select for themselves rank pages alone.
    assert counter.tolist() == [heads == 1]


def test_the_score_of_the_rest_of_no_pages_is_not_counted(impl: str) -> None:
    """As in a row of padding, whose tail page may hold anything."""
    counter, rest = torch.tensor([0]), torch.tensor([[math.nan], [math.nan]])
    limits = SelectRule(heads=1, max_pages=2, within=1.0, invalid_scores=counter)
    num_pages = torch.tensor([0, 9], dtype=torch.int32)
    select(torch.randn(2, 1, 9), num_pages, limits, rest=rest, impl=impl)
    assert counter.tolist() == [1]


def first_of_the_best(
    scores: list[list[float]], rest: list[float], forced: list[bool], rule: SelectRule
) -> list[int]:
    """The rule in plain Python, for the heads ``[heads, pages]`` that share one selection."""
    heads = [[-math.inf if x != x else min(x, FLOAT32.max) for x in head] for head in scores]
    values = heads[0]
    best = [max([*head, other]) for head, other in zip(heads, rest, strict=True)]
    if rule.within is not None:
        heads = [
            [x - top if top > -math.inf else top for x in head]
            for head, top in zip(heads, best, strict=True)
        ]
        values = [max(column) for column in zip(*heads, strict=True)]
    rank = [math.inf if is_forced else x for x, is_forced in zip(values, forced, strict=True)]
    ranked = sorted(range(len(values)), key=lambda page: (-rank[page], not forced[page], page))
    near = [rule.within is None or x >= -rule.within for x in values]
    return sorted(page for page in ranked[: rule.max_pages] if forced[page] or near[page])


FLOAT32 = torch.finfo(torch.float32)
HARD_SCORES = st.sampled_from([0.0, 1.0, 2.0, 3.0, math.inf, -math.inf, math.nan])
RESTS = st.sampled_from([0.0, 1.0, 2.0, 3.0])
RULES = st.sampled_from([{}, {"within": 0.0}, {"within": 1.0}])


@given(
    rule=RULES,
    heads=st.sampled_from([1, 2, 4]),
    group=st.integers(0, 3),
    width=st.integers(1, 20),
    most=st.integers(1, 22),
    data=st.data(),
)
def test_any_scores_choose_the_first_of_the_best(
    impl: str,
    rule: dict[str, float],
    heads: int,
    group: int,
    width: int,
    most: int,
    data: st.DataObject,
) -> None:
    """With ties, infinities and NaN, beside a score of the rest; 0: two heads have one score."""
    # Sums of several heads' shares are rounded: only ``within`` is exact for a group.
    group = group if "within" in rule else min(group, 1)
    given = heads * group or max(1, heads // 2)
    values = st.lists(HARD_SCORES, min_size=width, max_size=width)
    scores = data.draw(st.lists(values, min_size=given, max_size=given))
    rest = data.draw(st.none() | st.lists(RESTS, min_size=given, max_size=given))
    forced = data.draw(st.lists(st.booleans(), min_size=width, max_size=width))
    count = data.draw(st.integers(0, width))
    limits = SelectRule(heads=heads, max_pages=most, **rule)
    pages, lengths = select(
        torch.tensor([scores]),
        torch.tensor([count], dtype=torch.int32),
        limits,
        forced=torch.tensor([forced]),
        rest=None if rest is None else torch.tensor([rest]),
        impl=impl,
    )
    for head in range(heads):
        of_head = range(head * given // heads, head * given // heads + max(1, given // heads))
        own = [scores[i][:count] for i in of_head]
        beside = [-math.inf if rest is None else rest[i] for i in of_head]
        expected = first_of_the_best(own, beside, forced[:count], limits)
        assert pages[0, head].tolist() == expected + [-1] * (most - len(expected))
        assert int(lengths[0, head]) == len(expected)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"within": -1}, "within: got -1, expected at least 0"),
        ({"heads": 0}, "heads: got 0, expected 1 or more"),
        ({"max_pages": -1}, "max_pages: got -1, expected 0 or more"),
    ],
    ids=["within", "heads", "pages"],
)
def test_a_rule_out_of_range_is_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        SelectRule(**({"heads": 1, "max_pages": 2} | values))
