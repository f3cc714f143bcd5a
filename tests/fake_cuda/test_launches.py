"""A prefill and a decode step of every algorithm on a fake CUDA device, and what a layer launches.

Run ``python -m tests.fake_cuda.test_launches quest`` for the launches by name.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from hisparse.algorithms import ALGORITHMS, BaseSparseAlgorithm, build_algorithm
from hisparse.config import HiSparseConfig
from hisparse.plan.estimate import LAUNCHES
from hisparse.types import SelectionScope
from tests.fake_cuda.custom import Custom
from tests.fake_cuda.device import CUDA, fake_cuda
from tests.fake_cuda.engine import CONTEXT, LAYER, MODELS, FakeEngine, model
from tests.fake_cuda.launches import WrongDevice


class Bound(NamedTuple):
    """The most kernels that one layer may launch.

    Attributes:
        captured: in a step of a CUDA graph.
        eager: in an eager step that fills no tail page.
        context: tokens; shorter where an algorithm launches more in longer contexts.
    """

    captured: int
    eager: int
    context: int = CONTEXT


#: By algorithm: what was counted. At most 8 for the first four, and 12 for a custom one.
BOUNDS = {
    "quest": Bound(8, 6),
    "sketch": Bound(8, 6),
    "streaming": Bound(6, 5),
    "dsa": Bound(8, 8),
    "custom": Bound(11, 7),
    "oracle": Bound(12, 10, 4096),
    "snapkv": Bound(18, 17, 4096),
    "topp": Bound(189, 168, 4096),
}
#: They read keys in host memory, and are refused on a GPU.
ON_CPU_ONLY = {"dipr"}


def algorithm_of(name: str) -> BaseSparseAlgorithm:
    return Custom() if name == "custom" else build_algorithm(HiSparseConfig(algorithm=name))


def cases() -> Iterator[tuple[str, str, SelectionScope]]:
    for name in BOUNDS:
        for kind in MODELS:
            if kind == "GQA" and name == "dsa":
                continue
            # MLA has one KV head: both scopes are the same.
            scopes = ("layer",) if kind == "MLA" else ("layer", "kv_head")
            for scope in scopes:
                if scope in algorithm_of(name).scopes:
                    yield name, kind, scope


class Counts(NamedTuple):
    """Kernels by name that one layer launches."""

    prefill: Counter[str]
    eager: Counter[str]
    captured: Counter[str]


def count(name: str, kind: str, scope: SelectionScope) -> Counts:
    """Run the forwards of one case."""
    algorithm = algorithm_of(name)
    sizes = algorithm.page_sizes
    spec, context = model(kind, sizes and sizes[0]), BOUNDS[name].context
    with fake_cuda() as launches:
        engine = FakeEngine(launches, algorithm, spec, scope, context=context)
        found = []
        for forward in (engine.prefill, engine.decode, engine.captured):
            forward()
            found.append(launches.of_layer(LAYER))
    return Counts(*found)


def listed(counts: Counter[str]) -> str:
    """A line for each launch, the most frequent first."""
    return "\n".join(f"{number:5} {name}" for name, number in counts.most_common())


def test_plan_estimates_with_the_launches_that_are_counted() -> None:
    assert {name: bound.captured for name, bound in BOUNDS.items()} == LAUNCHES


def test_every_algorithm_has_a_bound() -> None:
    assert set(BOUNDS) == set(ALGORITHMS) - ON_CPU_ONLY | {"custom"}
    assert all(ALGORITHMS.get(name).reads_host_keys for name in ON_CPU_ONLY)


@pytest.mark.parametrize(("name", "kind", "scope"), list(cases()))
def test_a_layer_launches_no_more_than_its_bound(
    name: str, kind: str, scope: SelectionScope
) -> None:
    counts, bound = count(name, kind, scope), BOUNDS[name]
    for step in ("captured", "eager"):
        got, most = getattr(counts, step), getattr(bound, step)
        assert got.total() <= most, f"{got.total()} in {step} steps, at most {most}:\n{listed(got)}"
    assert counts.prefill


def test_mixed_devices_and_host_reads_are_refused() -> None:
    with fake_cuda():
        here, there = torch.zeros(4), torch.zeros(4, dtype=torch.int64, device=CUDA)
        with pytest.raises(RuntimeError, match="cpu"):
            there + here
        with pytest.raises(WrongDevice, match=r"aten.index: got tensors on cpu and cuda"):
            here[there]
        with pytest.raises(Exception, match="_local_scalar_dense"):
            int(there[0])


def test_a_kernel_that_gets_host_memory_is_refused() -> None:
    from hisparse.kernels import gather_pages
    from hisparse.types import PagedKV

    with fake_cuda() as launches:
        device = PagedKV(*(torch.zeros(4, 1, 8, 64, device=CUDA) for _ in "kv"))
        host = PagedKV(*(torch.zeros(4, 1, 8, 64) for _ in "kv"))
        pages = torch.zeros(1, 2, dtype=torch.int32, device=CUDA)
        with pytest.raises(WrongDevice, match="gather_pages: src.k"):
            gather_pages(host, pages, device, pages)
        for each in host:
            launches.pinned.add(each)
        gather_pages(host, pages, device, pages)
        assert launches.all[-1].name == "gather_pages"
        with launches.forward("a step", captured=True), pytest.raises(WrongDevice, match="a step"):
            torch.tensor([1], device=CUDA)


def main() -> None:
    """Print the launches of each case whose algorithm is asked for; without one, the totals."""
    asked = sys.argv[1:]
    for name, kind, scope in cases():
        if asked and name not in asked:
            continue
        counts = count(name, kind, scope)
        totals = ", ".join(f"{step} {each.total()}" for step, each in counts._asdict().items())
        print(f"{name:10} {kind} {scope:8} {totals}")
        if asked:
            print(listed(counts.captured))


if __name__ == "__main__":
    main()
