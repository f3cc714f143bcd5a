"""Differences between SGLang releases: names, request slots, and allocation without Triton."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

from hisparse.config import HiSparseConfig
from hisparse.doctor import software
from hisparse.errors import ConfigError
from hisparse.sglang import check_hooks, compat, dsa_indexer, names, plugin
from hisparse.sglang.cpu_page_allocator import allocate_slots, replace_triton_kernels
from hisparse.sglang.storage.setup import request_linker


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    return lambda found: monkeypatch.setattr(compat, "installed", lambda: found)


def test_releases_are_compared_as_numbers(release: Callable[[str | None], None]) -> None:
    release("0.5.9.post2")
    assert not compat.since("0.5.16")
    release("0.6.0rc1")
    assert compat.since("0.5.23")
    release(None)
    assert compat.since("0.5.23")


def test_a_store_on_a_release_without_the_linker_is_one_line(
    release: Callable[[str | None], None],
) -> None:
    release("0.5.22")
    config = HiSparseConfig.from_dict({"storage": {"path": "/somewhere"}})
    with pytest.raises(ConfigError, match=r"sglang 0\.5\.22 has no external linker .* 0\.5\.23"):
        request_linker(SimpleNamespace(), config)
    request_linker(SimpleNamespace(), HiSparseConfig())
    (check,) = software.storage()
    assert check.message == "the key storage needs sglang 0.5.23; all else works with 0.5.22"


def test_names_of_a_release(release: Callable[[str | None], None]) -> None:
    listed = ["a", ("0.5.20", "new", "old"), ("0.5.20", "added", ""), ("0.5.20", "", "removed")]
    release("0.5.18")
    assert names._installed_names(listed) == ("a", "old", "removed")
    release("0.5.20")
    assert names._installed_names(listed) == ("a", "new", "added")


def test_allocated_slots_are_reported_in_0_5_19(release: Callable[[str | None], None]) -> None:
    release("0.5.19")
    free = [4, 5, 6]

    def alloc_rows(need_size: int) -> list[int] | None:
        return None if need_size > len(free) else [free.pop() for _ in range(need_size)]

    begun: list[list[int]] = []
    pool = SimpleNamespace(alloc_rows=alloc_rows)
    compat.on_slots_allocated(pool, begun.append)
    assert [pool.alloc_rows(n) for n in (2, 0, 2)] == [[6, 5], [], None]
    assert begun == [[6, 5]]


def test_allocated_slots_are_reported_before_0_5_19(release: Callable[[str | None], None]) -> None:
    release("0.5.18")
    free = [4, 5]

    def alloc(requests: list[Any]) -> list[int] | None:
        if len(free) < sum(r.req_pool_idx is None for r in requests):
            return None
        for request in requests:
            request.req_pool_idx = free.pop() if request.req_pool_idx is None else 7
        return [r.req_pool_idx for r in requests]

    begun: list[list[int]] = []
    pool = SimpleNamespace(alloc=alloc)
    compat.on_slots_allocated(pool, begun.append)
    chunked = SimpleNamespace(req_pool_idx=7)
    assert pool.alloc([chunked, SimpleNamespace(req_pool_idx=None)]) == [7, 5]
    assert pool.alloc([chunked]) == [7]
    assert pool.alloc([SimpleNamespace(req_pool_idx=None) for _ in range(2)]) is None
    assert begun == [[5]]


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, ...]:
    """Prefix lengths, lengths, last slots, free pages, page size."""
    lengths = draw(
        # 16 times 50 tokens: as many as there are free pages, if a page holds one.
        st.lists(st.tuples(st.integers(0, 40), st.integers(1, 50)), min_size=1, max_size=16)
    )
    prefix, new = torch.tensor(lengths).T
    size = draw(st.sampled_from([1, 2, 4, 16]))
    last = 1000 * size + (prefix - 1) % size
    return prefix, prefix + new, last, torch.arange(900, 100, -1), torch.tensor(size)


@given(batches())
def test_host_slots_are_those_of_sglang(batch: tuple[torch.Tensor, ...]) -> None:
    prefix, lengths, last, free, size = batch
    expected = torch.empty(int((lengths - prefix).sum()), dtype=torch.int64)
    found = torch.empty_like(expected)
    alloc_extend_naive(prefix, lengths, last, free, expected, int(size), "cpu")
    allocate_slots(prefix, lengths, last, free, found, int(size))
    assert torch.equal(found, expected)


def test_the_replacements_of_the_triton_kernels() -> None:
    paged = SimpleNamespace()
    replace_triton_kernels(paged)
    lengths, last = torch.tensor([17, 20, 33]), torch.tensor([47, 66, 95])
    free, found = torch.arange(9, 12), torch.empty(3, dtype=torch.int64)
    paged.alloc_decode_kernel[(3,)](lengths, last, free, found, 4, 16)
    assert found.tolist() == [9 * 16, 67, 10 * 16]
    none = torch.arange(0)
    paged.alloc_decode_kernel[(3,)](lengths, last, none, found, 4, 16)
    assert found[1] == 67, "too few free pages are no error here: the allocator gives up after it"
    out = torch.empty(5, dtype=torch.int64)
    prefix, after, at = torch.tensor([3, 15]), torch.tensor([6, 17]), torch.tensor([34, 78])
    paged.alloc_extend_kernel[(2,)](prefix, after, at, free, out, 2, 16)
    assert out.tolist() == [35, 36, 37, 79, 9 * 16]


def test_index_keys_are_not_counted_before_0_5_18() -> None:
    """hisparse counts them as representations. Counted twice, they would shrink SGLang's pool."""
    from sglang.srt.model_executor import pool_configurator

    def original(configurator: Any, kvc: Any, num_layers: int) -> int:
        config = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=64)
        return num_layers * (320 + 132 * pool_configurator.is_deepseek_dsa(config))

    for backend, expected in (("hisparse", 640), ("torch_native", 904)):
        kvc = SimpleNamespace(server_args=SimpleNamespace(attention_backend=backend))
        assert dsa_indexer.around_compute_cell_size(original, None, kvc, 2) == expected


def test_a_hook_with_other_arguments_is_reported() -> None:
    def wrapper(original: Any, pool: Any, indices: list[int]) -> None: ...

    assert check_hooks.signature_mismatch(wrapper, lambda pool, rows: None) is None
    assert "'extra'" in str(
        check_hooks.signature_mismatch(wrapper, lambda pool, rows, *, extra: None)
    )
    assert "missing" in str(check_hooks.signature_mismatch(wrapper, lambda pool: None))


def test_every_hook_of_this_release_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    assert check_hooks.find_problems() == []
    target = next(t for t in names.HOOKS if t.endswith("resolve_max_num_reqs"))
    monkeypatch.setitem(plugin._originals, target, lambda self, tokens, rows: 0)
    (problem,) = check_hooks.find_problems()
    assert problem.startswith(f"the hook on {target} does not fit: its arguments are (self, tokens")
