"""The choice of DIPR's index: its rules, and its line in the log."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from hisparse.algorithms.dipr import DIPR
from hisparse.algorithms.dipr.optimizer import IndexQuestion, choose_index
from hisparse.config import HiSparseConfig
from hisparse.engine.build import EngineSetup, resolve
from hisparse.memory.costs import Resources
from tests.shapes import LLAMA

GIB = 2**30
LARGE = IndexQuestion(
    context_length=131072,
    expected_tokens=2048,
    new_tokens=8000,
    kv_token_bytes=131072,
    graph_token_bytes=32768,
    host_bytes=512 * GIB,
    has_graphs=True,
)


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({}, "fine", "host memory holds keys, values and 4,294,967,296 bytes of graphs"),
        ({"context_length": 32768}, "flat", "contexts below 65,536 tokens are scored whole"),
        ({"expected_tokens": 20000}, "flat", "20,000 of 131,072 tokens are expected in range"),
        ({"new_tokens": 1000}, "flat", "saves its build time in 2,000 steps, and 1,000 are"),
        ({"has_graphs": False}, "flat", "faiss, which builds graphs, is not installed"),
        ({"host_bytes": 19 * GIB}, "flat", "does not hold keys, values and 4,294,967,296 bytes"),
    ],
)
def test_rules(changes: dict[str, Any], kind: str, reason: str) -> None:
    choice = choose_index(replace(LARGE, **changes))
    assert choice.kind == kind
    assert reason in choice.reason
    assert "\n" not in choice.reason


def plan(options: dict[str, Any], *, context_length: int = 131072, host: int = 512) -> EngineSetup:
    config = HiSparseConfig(algorithm="dipr", algorithm_config=options)
    return resolve(
        config,
        LLAMA,
        128**-0.5,
        Resources(
            host_bytes=host * GIB,
            device_bytes=80 * GIB,
            context_length=context_length,
            max_requests=4,
            device_type="cpu",
        ),
    )


def test_the_server_chooses_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hisparse")
    chosen = plan({"expected_new_tokens": 4000}).algorithm
    assert chosen == DIPR(index="fine", expected_new_tokens=4000)
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith("hisparse: dipr finds tokens by index fine: 2,048 of 131,072 tokens")
    assert plan({}, context_length=8192).algorithm == DIPR(index="flat")
    assert plan({"alpha": 0.1}).algorithm == DIPR(index="flat", alpha=0.1)


@pytest.mark.parametrize("index", ["flat", "fine"])
def test_an_index_that_is_asked_for_is_taken(index: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hisparse")
    assert plan({"index": index}, context_length=4096).algorithm == DIPR(index=index)
    assert caplog.records == []


def test_graphs_take_their_part_of_host_memory() -> None:
    """32 links of 4 bytes for each of 8 heads in 32 layers, beside 128 KiB of K and V."""
    flat, fine = (plan({"index": index}, host=64).sizing.kv_tokens for index in ("flat", "fine"))
    assert fine == pytest.approx(flat * 4 / 5, abs=32)
