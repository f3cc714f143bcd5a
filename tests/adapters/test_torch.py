"""The adapter ``torch`` against float64 attention, and the merge of two parts."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from hisparse.adapters import Attended, TorchAdapter, merge_attended
from hisparse.types import AttentionRule, PagedKV

ADAPTER = TorchAdapter()


def oracle(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Attended:
    """``q [Q, D]``, ``k, v [n, D]`` in float64."""
    logits = q.double() @ k.double().T * scale
    return Attended(logits.softmax(-1) @ v.double(), logits.logsumexp(-1))


@pytest.mark.parametrize("stored_heads", [1, 2])
@pytest.mark.parametrize("lens", [[1, 8, 13], [24, 3, 24]], ids=str)
def test_pages(lens: list[int], stored_heads: int) -> None:
    k, v = torch.randn(2, 9, stored_heads, 8, 16)
    table = torch.tensor([[4, 1, 7], [0, 8, -1], [2, 3, 5]], dtype=torch.int32)
    q = torch.randn(3, 4, 16)
    beyond = torch.ones(9, 8, dtype=torch.bool)
    for row, length in enumerate(lens):
        for position in range(length):
            beyond[table[row, position // 8], position % 8] = False
    for pages in (k, v):
        pages.masked_fill_(beyond[:, None, :, None], torch.nan)
    if table[1, 2] == -1:
        lens = [lens[0], min(lens[1], 16), lens[2]]
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    out, lse = ADAPTER.attend(q, PagedKV(k, v), table, seq_lens, AttentionRule(0.3))
    for row, length in enumerate(lens):
        pages = table[row].clamp(min=0).long()
        for head in range(4):
            stored = head * stored_heads // 4
            keys, values = (x[pages, stored].flatten(0, 1)[:length] for x in (k, v))
            expected = oracle(q[row, head : head + 1], keys, values, 0.3)
            assert_close(out[row, head].double(), expected.out[0], rtol=1e-5, atol=1e-6)
            assert_close(lse[row, head].double(), expected.lse[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("tokens", [1, 63, 600])
def test_prefill(tokens: int, causal: bool) -> None:
    keys = tokens if causal else 37
    q, k, v = torch.randn(tokens, 6, 16), *torch.randn(2, keys, 2, 16)
    out, lse = ADAPTER.attend_prefill(q, k, v, AttentionRule(0.25), causal=causal)
    for token in {0, tokens // 2, tokens - 1}:
        seen = token + 1 if causal else keys
        for head in range(6):
            expected = oracle(
                q[token, head : head + 1], k[:seen, head // 3], v[:seen, head // 3], 0.25
            )
            assert_close(out[token, head].double(), expected.out[0], rtol=1e-4, atol=1e-5)
            assert_close(lse[token, head].double(), expected.lse[0], rtol=1e-4, atol=1e-5)


def test_values_narrower_than_keys() -> None:
    q, k, v = torch.randn(5, 4, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 8)
    out, lse = ADAPTER.attend_prefill(q, k, v, AttentionRule(0.25), causal=False)
    assert out.shape == (5, 4, 8)
    for head in range(4):
        expected = oracle(q[:, head], k[:, head // 2], v[:, head // 2], 0.25)
        assert_close(out[:, head].double(), expected.out, rtol=1e-4, atol=1e-5)
        assert_close(lse[:, head].double(), expected.lse, rtol=1e-4, atol=1e-5)


def test_parts_merge_to_the_whole_also_when_one_is_empty() -> None:
    q, k, v = torch.randn(4, 16), *torch.randn(2, 20, 16)
    whole = oracle(q, k, v, 0.3)
    a, b = oracle(q, k[:7], v[:7], 0.3), oracle(q, k[7:], v[7:], 0.3)
    assert_close(merge_attended(a, b), whole)
    empty = Attended(torch.zeros(4, 16).double(), torch.full((4,), -torch.inf).double())
    assert_close(merge_attended(whole, empty), whole)
    assert_close(merge_attended(empty, empty), empty)
