"""The gate of ``hisparse bench serve``: what has to agree before a time is shown."""

from __future__ import annotations

import pytest

from hisparse_bench.serve import ServeBench
from hisparse_bench.server import Generation

IMPLS = ("torch_native", "hisparse_dense", "hisparse")
BENCH = ServeBench(model="m", prompt=[1] * 30, budget=64, num_tokens=3, repeats=2, num_threads=1)


def _runs(**ids: list[int]) -> dict[str, list[Generation]]:
    """A run that is not timed and two that are, each later one 10 times as slow."""
    return {
        impl: [
            Generation("", ids.get(impl, [5, 6, 7]), [scale * t for t in (1.0, 1.5, 2.0)], 30, 0)
            for scale in (100.0, 1.0, 10.0)
        ]
        for impl in IMPLS
    }


def test_the_first_run_is_not_timed() -> None:
    ttft, per_token = BENCH._cases(_runs())
    assert [ttft.name, per_token.name] == ["ttft", "time_per_token"]
    assert [r.impl for r in ttft.results] == list(IMPLS)
    assert ttft.results[0].median_us == 5.5e6
    assert per_token.results[0].median_us == 2.75e6
    assert ttft.params["context"] == 30


@pytest.mark.parametrize(
    ("different", "gate"),
    [
        ({}, "passed"),
        ({"hisparse": [5, 9, 9]}, "passed"),
        ({"hisparse": [9, 6, 7]}, "failed"),
        ({"hisparse_dense": [5, 6, 9]}, "failed"),
        ({impl: [] for impl in IMPLS}, "failed"),
    ],
    ids=["same", "sparse decoding differs", "prefill differs", "dense differs", "nothing"],
)
def test_gate(different: dict[str, list[int]], gate: str) -> None:
    assert [case.gate for case in BENCH._cases(_runs(**different))] == [gate, gate]


def test_the_dense_path_is_the_same_setting_but_for_its_threshold() -> None:
    sparse, dense = dict(BENCH._config("hisparse")), dict(BENCH._config("hisparse_dense"))
    assert dense.pop("min_sparse_context") > 33
    assert dense == sparse
    assert sparse["budget"] == 64
