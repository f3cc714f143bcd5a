"""What merging takes: a row's tokens shared by several programs, and what none of them sees."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from hisparse.kernels import SelectRule, paged_attention, select
from hisparse.kernels.attention import reference
from hisparse.types import UNSCALED, AttentionRule, PagedKV, StoredKV
from tests.kernels.gpu.on_gpu import ON_GPU

WIDTH = 40


@pytest.fixture
def split_kernels(impl: str) -> Iterator[ModuleType | None]:
    """Triton's module, where the suite runs on the interpreter: it never splits on a CPU."""
    if impl != ON_GPU or os.environ.get("TRITON_INTERPRET") != "1":
        yield None
        return
    from hisparse.kernels.attention import triton as triton_attention

    yield triton_attention


def _attend(
    impl: str, dtype: torch.dtype, rank: int | None, rule: AttentionRule = UNSCALED
) -> tuple[Tensor, ...]:
    """Rows of 0, 1, 63 and 528 tokens in pages of 7; what is not to be read is NaN."""
    torch.manual_seed(rank or 0)
    lens = torch.tensor([0, 1, 63, 528], dtype=torch.int32)
    total = 4 * 76
    k = torch.randn(total, 7, 2, WIDTH).to(dtype).transpose(1, 2)
    v = torch.randn(total, 7, 2, 24).to(dtype).transpose(1, 2) if rank is None else k[..., :rank]
    table = torch.randperm(total).view(4, 76).to(torch.int32)
    beyond = torch.arange(76 * 7) >= lens[:, None]
    unread = torch.zeros(total, 7, dtype=torch.bool)
    unread[table.long()] = beyond.view(4, 76, 7)
    query = (torch.randn(4, 6, WIDTH) * WIDTH**-0.5).to(dtype).float()
    clean = StoredKV(k.clone(), v.clone())
    expected = reference.paged_attention(query, clean, table, lens, rule)
    k.masked_fill_(unread[:, None, :, None], torch.nan)
    v.masked_fill_(unread[:, None, :, None], torch.nan)
    found = paged_attention(query, PagedKV(k, v), table, lens, rule=rule, impl=impl)
    return (*found, *expected)


# Steps are of 16 tokens: 33 splits share 528 tokens, and are merged in more than one turn.
@pytest.mark.parametrize(
    ("splits", "dtype", "rank", "tolerance"),
    [
        pytest.param(1, torch.float32, None, 1e-5, id="1-fp32"),
        pytest.param(2, torch.float16, None, 1e-5, id="2-fp16"),
        pytest.param(5, torch.bfloat16, None, 1e-4, id="5-bf16"),
        pytest.param(33, torch.float32, None, 1e-5, id="33-fp32"),
        pytest.param(5, torch.float32, 32, 1e-5, id="5-latent-fp32"),
    ],
)
def test_splits_change_nothing(
    impl: str,
    split_kernels: ModuleType | None,
    monkeypatch: pytest.MonkeyPatch,
    splits: int,
    dtype: torch.dtype,
    rank: int | None,
    tolerance: float,
) -> None:
    if split_kernels is not None:
        monkeypatch.setattr(split_kernels, "num_splits", lambda *sizes: splits)
    out, lse, expected, expected_lse = _attend(impl, dtype, rank)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=tolerance, atol=tolerance)
    assert not out[0].any()
    assert (lse[0] == -torch.inf).all()


@pytest.mark.parametrize("window", [1, 16, 100, 600])
def test_splits_share_the_tokens_of_a_window(
    impl: str,
    split_kernels: ModuleType | None,
    monkeypatch: pytest.MonkeyPatch,
    window: int,
) -> None:
    if split_kernels is not None:
        monkeypatch.setattr(split_kernels, "num_splits", lambda *sizes: 3)
    rule = AttentionRule(1.0, 3.0, window)
    out, lse, expected, expected_lse = _attend(impl, torch.float32, None, rule)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_whichever_split_ends_last_merges_to_the_same_bits(
    impl: str, split_kernels: ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the interpreter each launch runs its programs in another order."""
    if split_kernels is None:
        return
    from triton.runtime.interpreter import interpreter_builder as builder

    monkeypatch.setattr(split_kernels, "num_splits", lambda *sizes: 5)
    orders: list[list[tuple[int, ...]]] = []
    place = builder.set_grid_idx

    def placed(*index: int) -> None:
        place(*index)
        orders[-1].append(builder.grid_idx)

    monkeypatch.setattr(builder, "set_grid_idx", placed)
    results = []
    for _ in range(3):
        orders.append([])
        results.append(_attend(impl, torch.bfloat16, None)[:2])
        assert not split_kernels.arrival_counters(1, results[0][0].device).any()
    assert orders[0] != orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(set(orders[2]))
    assert all(map(torch.equal, results[0] * 2, results[1] + results[2]))


def test_splits_are_one_wave_of_at_least_128_tokens(
    impl: str, split_kernels: ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if split_kernels is None:
        return
    gpu = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    device, token_partials = torch.device("cuda"), 0.25

    def splits(programs: int, tokens: int) -> int:
        found: int = split_kernels.num_splits(device, programs, 2, tokens, token_partials)
        return found

    assert splits(8, 2048) == 16
    assert splits(64, 2048) == 4
    assert splits(100, 2048) == 2
    # 264 programs at once: 150 rows of two splits each would be a wave and a bit.
    assert splits(150, 2048) == splits(1000, 2048) == 1
    assert splits(8, 100) == 1


@pytest.mark.parametrize("heads", [1, 2, 4, 8], ids=lambda h: f"select{h}")
def test_a_table_without_pages_selects_none(impl: str, heads: int) -> None:
    none = torch.zeros(3, dtype=torch.int32)
    rule = SelectRule(heads=heads, max_pages=5)
    forced = torch.empty(3, 0, dtype=torch.bool)
    pages, lengths = select(torch.empty(3, 4, 0), none, rule, forced=forced, impl=impl)
    assert pages.tolist() == [[[-1] * 5] * heads] * 3
    assert lengths.tolist() == [[0] * heads] * 3
