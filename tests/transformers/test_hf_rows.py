"""Rows of a cache: forks, crops, resets, and forwards that fail."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hisparse.errors import CapacityError, HiSparseError
from hisparse.transformers import HiSparseCache, enable
from hisparse.transformers.rows import HostPageAllocator
from tests.transformers.hf_models import SMALL, continuation, left_padded, prompt

#: Lengths at the end of a page, one token later, and within a page.
LENGTHS = (320, 321, 333)


def _prefill(net: Any, cache: HiSparseCache, ids: torch.Tensor) -> None:
    with torch.no_grad():
        net(ids, past_key_values=cache)


def _decode(net: Any, rows: HiSparseCache, ids: torch.Tensor) -> torch.Tensor:
    """Logits of given columns ``ids [B, T]``, one after the other."""
    steps = []
    for column in ids.T:
        places = torch.tensor(rows.row_lengths)[:, None]
        with torch.no_grad():
            steps.append(net(column[:, None], position_ids=places, past_key_values=rows).logits)
    return torch.cat(steps, 1)


def _free(cache: HiSparseCache) -> tuple[int, int]:
    """Numbers of free host pages and free request slots."""
    return cache.row_store.pages.num_free, len(cache.row_store._free_slots)


@pytest.mark.parametrize("length", LENGTHS)
def test_forks_share_the_prefix_and_answer_as_if_each_had_its_own(net: Any, length: int) -> None:
    text, questions = prompt(length, seed=1), prompt(11, seed=2, batch=3)
    cache = enable(net, SMALL, max_batch_size=4, max_length=400)
    alone = []
    for question in questions:
        alone += continuation(net, torch.cat([text, question[None]], 1), 20, cache)
        cache.reset()
    everything = _free(cache)
    _prefill(net, cache, text)
    before = _free(cache)
    with cache.fork(3) as rows:
        copied = 3 if length % 16 else 0
        assert before[0] - _free(cache)[0] == copied, "full pages are shared, partial ones copied"
        full = torch.cat([text.expand(3, -1), questions], 1)
        assert continuation(net, full, 20, rows) == alone
        assert rows.row_lengths == (length + 30,) * 3
        # The rows wrote to pages of their own: the prefix goes on as before.
        question = torch.cat([text, questions[:1]], 1)
        assert continuation(net, question, 20, cache) == alone[:1]
    cache.reset()
    assert _free(cache) == everything


def test_a_fork_of_several_rows_keeps_their_order_and_padding(net: Any) -> None:
    ids, mask = left_padded((200, 77), seed=3)
    cache = enable(net, SMALL, max_batch_size=6, max_length=300)
    with torch.no_grad():
        places = (mask.cumsum(1) - 1).clamp(min=0)
        net(ids, attention_mask=mask, position_ids=places, past_key_values=cache)
    with cache.fork(2) as rows:
        assert rows.row_lengths == (200, 200, 77, 77)
        more = prompt(5, seed=4, batch=4)
        full = torch.cat([ids.repeat_interleave(2, 0), more], 1)
        padding = torch.cat([mask.repeat_interleave(2, 0), torch.ones_like(more)], 1)
        answers = continuation(net, full, 15, rows, attention_mask=padding)
    cache.reset()
    for row, length in enumerate((200, 200, 77, 77)):
        assert continuation(net, full[row : row + 1, -length - 5 :], 15, cache) == [answers[row]]
        cache.reset()


def test_rows_that_are_kept_go_on_and_the_others_are_given_back(net: Any) -> None:
    """``batch_select_indices`` drops rows in the middle of a batch's columns."""
    text, more = prompt(250, seed=5), prompt(9, seed=6, batch=4)
    cache = enable(net, SMALL, max_batch_size=5, max_length=300)
    _prefill(net, cache, text)
    everything = _free(cache)

    logits = partial(_decode, net)

    with cache.fork(4) as rows:
        logits(rows, more[:, :5])
        rows.batch_select_indices(torch.tensor([3, 1]))
        assert rows.row_lengths == (255, 255)
        kept = logits(rows, more[[3, 1], 5:])
        # What was given back is there for others.
        with cache.fork(2) as others:
            assert others.row_lengths == (250, 250)
    assert _free(cache) == everything
    for row, found in zip((3, 1), kept, strict=True):
        with cache.fork() as one:
            alone = logits(one, more[row : row + 1])[0, 5:]
        assert (found - alone).abs().max() < 1e-3
    with cache.fork(2) as rows:
        some = [torch.tensor(x, dtype=torch.long) for x in ([], [0, 0], [2], [[0, 1]])]
        for wrong in (*some, torch.tensor([True, False])):
            with pytest.raises(HiSparseError, match="one or more different rows of 0 to 1"):
                rows.batch_select_indices(wrong)
        assert rows.row_lengths == (250, 250)


def test_rows_that_forked_at_different_places_go_on_side_by_side(net: Any) -> None:
    text, more = prompt(333, seed=5), prompt(9, seed=6, batch=4)
    cache = enable(net, SMALL, max_batch_size=6, max_length=400)
    everything = _free(cache)

    logits = partial(_decode, net)

    alone, forks = [], []
    for start, end, own in ((0, 250, more[:1]), (250, 320, more[1:3]), (320, 333, more[3:])):
        _prefill(net, cache, text[:, start:end])
        with cache.fork(len(own)) as rows:
            alone.append(logits(rows, own))
        forks.append(cache.fork(len(own)))
    cache.reset()
    with HiSparseCache.join(forks) as rows:
        assert rows.row_lengths == (250, 320, 320, 333)
        assert [fork.row_lengths for fork in forks] == [(), (), ()]
        assert (logits(rows, more) - torch.cat(alone)).abs().max() < 1e-3
    assert _free(cache) == everything


def test_caches_that_cannot_be_joined(net: Any) -> None:
    cache = enable(net, SMALL, max_batch_size=2, max_length=300)
    other = HiSparseCache(net, SMALL, max_length=300)
    for each in (cache, other):
        _prefill(net, each, prompt(40, seed=5))
    for wrong in ([], [cache, cache], [cache, other]):
        with pytest.raises(HiSparseError, match=f"join: got {len(wrong)} caches .*expected diff"):
            HiSparseCache.join(wrong)
    assert cache.row_lengths == other.row_lengths == (40,)


def test_suffixes_of_unequal_length_column_by_column(net: Any) -> None:
    """Teacher-forced decode steps: after the end of its suffix a row gets only padding."""
    text, lengths = prompt(250, seed=5), (9, 4, 1)
    suffixes = prompt(max(lengths), seed=6, batch=3)
    cache = enable(net, SMALL, max_batch_size=4, max_length=300)
    _prefill(net, cache, text)
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]

    def logits(rows: HiSparseCache, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        seen = torch.ones(len(ids), 250, dtype=torch.bool)
        steps = []
        for n in range(ids.shape[1]):
            mask = torch.cat([seen, real[:, : n + 1]], 1)
            place = {"position_ids": torch.full((len(ids), 1), 250 + n), "attention_mask": mask}
            with torch.no_grad():
                steps.append(net(ids[:, n : n + 1], past_key_values=rows, **place).logits)
        return torch.cat(steps, 1)

    with cache.fork(3) as rows:
        together = logits(rows, suffixes, real)
        assert rows.row_lengths == tuple(250 + n for n in lengths)
    for row, length in enumerate(lengths):
        with cache.fork() as one:
            own = slice(row, row + 1), slice(length)
            alone = logits(one, suffixes[own], real[own])
        assert (together[own] - alone).abs().max() < 1e-3


@pytest.mark.parametrize("left", [320, 304, 301, 16, 3, 0])
@pytest.mark.parametrize("forked", [False, True], ids=["its own pages", "shared pages"])
def test_what_was_cropped_is_forgotten(net: Any, left: int, forked: bool) -> None:
    text, other = prompt(333, seed=7), prompt(340, seed=8)
    new = torch.cat([text[:, :left], other[:, left:]], 1)
    cache = enable(net, SMALL, max_batch_size=2, max_length=400)
    fresh = continuation(net, new, 15, cache)
    cache.reset()
    whole = continuation(net, text, 15, cache)
    cache.crop(-14)
    rows = cache.fork() if forked else cache
    rows.crop(left - 333)
    assert (rows.get_seq_length(), rows.row_lengths) == (left, (left,))
    assert continuation(net, new, 15, rows) == fresh
    if forked:
        cache.crop(-3)
        assert continuation(net, text, 15, cache) == whole, "the fork wrote to shared pages"
        rows.reset()
    cache.reset()
    assert _free(cache) == (2 * 25, 2)


def test_a_crop_counts_columns_and_rows_lose_their_tokens_in_them(net: Any) -> None:
    ids, mask = left_padded((50, 7), seed=9)
    cache = enable(net, SMALL, max_batch_size=2, max_length=100)
    with torch.no_grad():
        net(ids, attention_mask=mask, past_key_values=cache)
    cache.crop(-10)
    assert (cache.get_seq_length(), cache.row_lengths) == (40, (40, 0))
    cache.crop(0)
    assert cache.get_seq_length() == 40


def test_a_cropped_row_counts_no_choice_again(net: Any) -> None:
    """It goes on with tokens of its own: it reuses nothing."""
    ids = prompt(400, seed=9)
    cache = enable(net, SMALL, max_batch_size=1, max_length=420)
    with torch.no_grad():
        net(ids, past_key_values=cache)
        for _ in range(3):
            net(ids[:, :1], past_key_values=cache)
            cache.crop(-1)
            net(ids[:, :5], past_key_values=cache)
            cache.crop(-5)
    assert {name: n for name, n in cache.stats().choices.items() if n} == {"sparse": 1}


@pytest.mark.parametrize("columns", [1, 20], ids=["decode", "prefill"])
def test_a_forward_that_failed_is_undone(net: Any, columns: int) -> None:
    """The last layer fails at a page's end, after other layers wrote and promoted pages."""
    text = prompt(319, seed=10)
    cache = enable(net, SMALL, max_length=400)
    expected = continuation(net, text, 20, cache)
    cache.reset()
    _prefill(net, cache, text)
    free = _free(cache)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    last = net.model.layers[-1].self_attn.q_proj.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        _prefill(net, cache, prompt(columns, seed=11))
    last.remove()
    assert cache.get_seq_length() == 319
    cache.crop(-2)
    assert _free(cache) == free
    assert continuation(net, text, 20, cache) == expected


def test_a_forward_that_could_not_begin_is_undone(
    net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = enable(net, SMALL, max_length=400)
    _prefill(net, cache, prompt(100, seed=15))
    free = _free(cache)

    def fail(batch: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(cache.row_store.coordinator, "forward_begin", fail)
        with pytest.raises(MemoryError):
            _prefill(net, cache, prompt(50, seed=16))
    assert (_free(cache), cache.row_lengths) == (free, (100,))
    whole = torch.cat([prompt(100, seed=15), prompt(50, seed=16)], 1)
    answer = continuation(net, whole, 10, cache)
    cache.reset()
    assert answer == continuation(net, whole, 10, cache)


def test_a_cache_is_as_new_after_a_reset(net: Any) -> None:
    cache = enable(net, SMALL, max_batch_size=3, max_length=200)
    before = _free(cache)
    first = continuation(net, prompt(150, seed=12), 10, cache)
    cache.reset()
    assert (cache.get_seq_length(), cache.row_lengths, _free(cache)) == (0, (), before)
    continuation(net, prompt(120, seed=13, batch=3), 10, cache)
    cache.reset()
    assert continuation(net, prompt(150, seed=12), 10, cache) == first


def test_host_memory_that_is_over_leaves_the_rows_as_they_were(net: Any) -> None:
    cache = enable(net, SMALL, max_batch_size=2, max_length=304, max_tokens=304)
    text = prompt(300, seed=14)
    _prefill(net, cache, text[:, :280])
    with cache.fork() as rows, pytest.raises(CapacityError, match="got 1 to allocate, .* the 0 "):
        _prefill(net, rows, text[:, 280:])
    assert cache.row_lengths == (280,)
    assert len(continuation(net, text, 4, cache)[0]) == 4
    with pytest.raises(CapacityError, match="got 1 to allocate, .* the 0 "):
        cache.fork()
    assert _free(cache) == (0, 1)


PAGES = 12


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7)), max_size=60))
def test_pages_are_free_or_owned(steps: list[tuple[int, int]]) -> None:
    """Any order of allocations, shares and frees, against a list of owners."""
    allocator = HostPageAllocator(PAGES)
    owned: list[int] = []
    for what, n in steps:
        if what == 0 and n <= allocator.num_free:
            got = allocator.allocate(n).tolist()
            assert not set(got) & set(owned)
            assert set(got) <= set(range(1, PAGES + 1))
            owned += got
        elif what == 0:
            with pytest.raises(CapacityError, match="max_tokens"):
                allocator.allocate(n)
        elif owned:
            page = owned[n % len(owned)]
            pages = torch.tensor([page] * (1 + n % 2), dtype=torch.int32).numpy()
            if what == 1:
                allocator.share(pages)
                owned += pages.tolist()
            else:
                allocator.free(pages[:1])
                owned.remove(page)
        assert allocator.num_free == PAGES - len(set(owned))
        assert all(allocator.is_shared(p) == (owned.count(p) > 1) for p in owned)
