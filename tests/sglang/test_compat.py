"""Differences between SGLang releases: names, request slots, and allocation without Triton."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hisparse.config import HiSparseConfig
from hisparse.doctor import software
from hisparse.errors import ConfigError
from hisparse.sglang import check_hooks, compat, names, plugin
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
