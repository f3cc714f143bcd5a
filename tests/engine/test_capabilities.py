"""The configuration is checked against the declarations of the algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from hisparse.algorithms import ALGORITHMS
from hisparse.algorithms.quest import Quest
from hisparse.config import HiSparseConfig
from hisparse.engine.capabilities import check_capabilities
from hisparse.errors import ConfigError


@pytest.fixture(autouse=True)
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """An algorithm with narrow declarations, registered for the test."""

    @dataclass(frozen=True, kw_only=True)
    class Limited(Quest):
        scopes: ClassVar[Any] = ("layer",)
        page_sizes: ClassVar[Any] = (1, 64)

    monkeypatch.setitem(ALGORITHMS._entries, "limited", Limited)


def config(**settings: Any) -> HiSparseConfig:
    return HiSparseConfig(**({"algorithm": "limited", "page_size": 64} | settings))


def test_what_it_can_do_is_accepted() -> None:
    check_capabilities(config(), "cpu")
    check_capabilities(config(page_size=1, selection_scope="layer"), "cpu")
    check_capabilities(config(algorithm="quest", selection_scope="query_head"), "cuda")


@pytest.mark.parametrize(
    ("settings", "device", "words"),
    [
        (
            {"page_size": 16},
            "cpu",
            ["'limited' cannot do page_size 16", "its page sizes: 1, 64", "that can: ", "quest"],
        ),
        (
            {"algorithm": "dipr", "algorithm_config": {"index": "flat"}},
            "cuda",
            ["'dipr' with {'index': 'flat'}: got device cuda, expected cpu"],
        ),
        (
            {"algorithm": "quest", "kv_cache_dtype": "fp8_e4m3", "adapter": "flashinfer"},
            "cuda",
            [
                "adapter 'flashinfer' cannot do kv_cache_dtype fp8_e4m3",
                "(adapters that can: dsa, torch",
            ],
        ),
        (
            {"selection_scope": "kv_head"},
            "cpu",
            ["selection_scope 'kv_head'", "'limited'", "choices: layer;", "can: ", "quest"],
        ),
    ],
    ids=["page-size", "device", "fp8-adapter", "scope"],
)
def test_what_it_cannot_do_names_who_can(
    settings: dict[str, Any], device: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_capabilities(config(**settings), device)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "limited" not in message.partition("that can:")[2]
    assert "\n" not in message
