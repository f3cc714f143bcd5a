"""What ``hisparse doctor`` finds if a hook does not fit the function that it wraps."""

from __future__ import annotations

from typing import Any

import pytest

from hisparse.sglang import check_hooks, hooks, install


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
    target = next(t for t in hooks.HOOKS if t.endswith("resolve_max_num_reqs"))
    monkeypatch.setitem(install._originals, target, lambda self, tokens, rows: 0)
    (problem,) = check_hooks.find_problems()
    assert problem.startswith(f"the hook on {target} does not fit: its arguments are (self, tokens")
