"""What merging takes: a row's tokens shared by several programs, and what none of them sees."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from hisparse.kernels import SelectRule, paged_attention, select
from hisparse.types import UNSCALED, AttentionRule, PagedKV
from tests.kernels.gpu.on_gpu import ON_GPU
from tests.kernels.test_attention import check_paged, paged_case

WIDTH = 40


@pytest.fixture
def split_kernels(impl: str) -> Iterator[ModuleType | None]:
    """Triton's module, where the suite runs on the interpreter: it never splits on a CPU."""
    if impl != ON_GPU or os.environ.get("TRITON_INTERPRET") != "1":
        yield None
        return
    from hisparse.kernels.attention import triton as triton_attention

    yield triton_attention


def _case(
    dtype: torch.dtype, rank: int | None, rule: AttentionRule = UNSCALED
) -> tuple[Tensor, PagedKV, Tensor, Tensor, AttentionRule]:
    """Rows of 0, 1, 63 and 528 tokens in pages of 7, as ``check_paged`` takes them."""
    torch.manual_seed(rank or 0)
    kv, table, lens = paged_case(rule, [0, 1, 63, 528], 2, 7, (WIDTH, 24), dtype)
    query = (torch.randn(4, 6, WIDTH) * WIDTH**-0.5).to(dtype).float()
    return query, kv if rank is None else PagedKV(kv.k, kv.k[..., :rank]), table, lens, rule


# Steps are of 16 tokens: 33 splits share 528 tokens, and are merged in more than one turn.
@pytest.mark.parametrize(
    ("splits", "dtype", "rank"),
    [
        pytest.param(1, torch.float32, None, id="1-fp32"),
        pytest.param(2, torch.float16, None, id="2-fp16"),
        pytest.param(5, torch.bfloat16, None, id="5-bf16"),
        pytest.param(33, torch.float32, None, id="33-fp32"),
        pytest.param(5, torch.float32, 32, id="5-latent-fp32"),
    ],
)
def test_splits_change_nothing(
    impl: str,
    split_kernels: ModuleType | None,
    monkeypatch: pytest.MonkeyPatch,
    splits: int,
    dtype: torch.dtype,
    rank: int | None,
) -> None:
    if split_kernels is not None:
        monkeypatch.setattr(split_kernels, "num_splits", lambda *sizes: splits)
    check_paged(*_case(dtype, rank), impl)


@pytest.mark.parametrize("window", [1, 16, 100, 600])
def test_splits_share_the_tokens_of_a_window(
    impl: str,
    split_kernels: ModuleType | None,
    monkeypatch: pytest.MonkeyPatch,
    window: int,
) -> None:
    if split_kernels is not None:
        monkeypatch.setattr(split_kernels, "num_splits", lambda *sizes: 3)
    check_paged(*_case(torch.float32, None, AttentionRule(1.0, 3.0, window)), impl)


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
    *inputs, rule = _case(torch.bfloat16, None)
    results = []
    for _ in range(3):
        orders.append([])
        results.append(paged_attention(*inputs, rule=rule, impl=impl))
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


@pytest.mark.parametrize("window", [0, 3000])
def test_a_row_s_output_does_not_depend_on_others(window: int) -> None:
    """On a CPU to the bit: a request alone gets the tokens that it gets in a batch."""
    torch.manual_seed(0)
    rule = AttentionRule(1.0, window=window)
    lens = [1, 1024, 1025, 1535, 1536, 1540, 2560, 6400]
    kv, table, seq_lens = paged_case(rule, lens, 1, 16, (16, 16), torch.float32)
    query = torch.randn(len(lens), 2, 16) / 4
    check_paged(query, kv, table, seq_lens, rule, "auto")
    out, lse = paged_attention(query, kv, table, seq_lens, rule=rule)
    for row, length in enumerate(lens):
        own = slice(row, row + 1)
        pages = table[own, : -(-length // 16)].contiguous()
        alone = paged_attention(query[own], kv, pages, seq_lens[own], rule=rule)
        assert torch.equal(alone[0], out[own])
        assert torch.equal(alone[1], lse[own])
