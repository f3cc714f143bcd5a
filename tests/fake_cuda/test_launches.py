"""A prefill and a decode step of every algorithm on a fake CUDA device, and what a layer launches.

Run ``python -m tests.fake_cuda.test_launches quest`` for the launches by name.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from hisparse.algorithms import ALGORITHMS, BaseSparseAlgorithm, build_algorithm
from hisparse.config import HiSparseConfig
from hisparse.types import SelectionScope
from tests.fake_cuda.custom import Custom
from tests.fake_cuda.device import fake_cuda
from tests.fake_cuda.engine import CONTEXT, KINDS, LAYER, MODELS, FakeEngine, model

NAMES = [*ALGORITHMS, "custom"]
#: Tokens, where an algorithm launches more in longer contexts.
_SHORT = {"oracle": 4096, "snapkv": 4096}


#: The most kernels that a selecting layer launches in an eager step that fills no tail page.
EAGER_LAUNCHES = {
    "streaming": 5, "quest": 6, "sketch": 6, "dsa": 8, "dipr": 9, "oracle": 10, "snapkv": 11,
    "infllm": 27, "msa": 9, "qsa": 9,
}  # fmt: skip


#: Kernels of a captured layer that attends the selection of the layer before it.
SHARING_LAUNCHES = 5


def context_of(name: str) -> int:
    """Tokens with which the launches of an algorithm are counted."""
    return _SHORT.get(name, CONTEXT)


def algorithm_of(name: str) -> BaseSparseAlgorithm:
    return Custom() if name == "custom" else build_algorithm(HiSparseConfig(algorithm=name))


def scope_of(algorithm: BaseSparseAlgorithm) -> SelectionScope:
    """ "layer", or what the algorithm has in its place."""
    return "layer" if "layer" in algorithm.scopes else algorithm.scopes[0]


def cases() -> Iterator[tuple[str, str, SelectionScope]]:
    for name in NAMES:
        for kind in KINDS[algorithm_of(name).indexer]:
            # MLA has one KV head: both scopes are the same.
            scopes = ("layer",) if kind == "MLA" else ("layer", "kv_head")
            for scope in scopes:
                if scope in algorithm_of(name).scopes:
                    yield name, kind, scope


class Counts(NamedTuple):
    """Kernels by name that one layer launches, and whether one of them scores and appends."""

    appends: bool
    prefill: Counter[str]
    eager: Counter[str]
    captured: Counter[str]


def count(name: str, kind: str, scope: SelectionScope) -> Counts:
    """Run the forwards of one case."""
    algorithm = algorithm_of(name)
    sizes = algorithm.page_sizes
    spec, context = model(kind, sizes and sizes[0]), context_of(name)
    with fake_cuda() as launches:
        engine = FakeEngine(launches, algorithm, spec, scope, context=context)
        found: list[Any] = [algorithm.appends(engine.policy)]
        for forward in (engine.prefill, engine.decode, engine.captured):
            forward()
            found.append(launches.of_layer(LAYER))
    return Counts(*found)


def listed(counts: Counter[str]) -> str:
    """A line for each launch, the most frequent first."""
    return "\n".join(f"{number:5} {name}" for name, number in counts.most_common())


@pytest.mark.parametrize(("name", "kind", "scope"), list(cases()))
def test_a_layer_launches_no_more_than_its_algorithm_says(
    name: str, kind: str, scope: SelectionScope
) -> None:
    counts, algorithm = count(name, kind, scope), algorithm_of(name)
    bounds = {"captured": algorithm.captured_launches, "eager": EAGER_LAUNCHES.get(name, 7)}
    for step, most in bounds.items():
        got, most = getattr(counts, step), most - counts.appends
        assert got.total() <= most, f"{got.total()} in {step} steps, at most {most}:\n{listed(got)}"
    assert counts.prefill


@pytest.mark.parametrize(("ranks", "launches_of"), [(1, 0), (8, 1)])
def test_scores_append_the_tokens_of_one_rank(ranks: int, launches_of: int) -> None:
    """With the queries of eight ranks a KV head has more than the kernel takes tokens beside."""
    with fake_cuda() as launches:
        spec = replace(model("MLA"), num_q_heads=16)
        FakeEngine(launches, algorithm_of("sketch"), spec, "layer", ranks=ranks).captured()
        assert launches.of_layer(LAYER)["append_tokens"] == launches_of


def test_captured_steps_serve_full_tail_pages_beside_the_model() -> None:
    """Their launches are always there, and the model's next ones do not wait for them."""
    counts = count("sketch", "GQA", "kv_head")
    aside = {"aside.promote_tail", "aside.triton.sketch.sketch_kernel"}
    assert {x for x in counts.captured if x.startswith("aside.")} == aside
    assert not [x for x in counts.eager if x.startswith("aside.")]


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_cpu_attends_beside_a_captured_layer(kind: str, sinks: bool) -> None:
    """No copy waits; loads follow the attention, and only its results are waited for."""
    totals, names = [], []
    for miss in ("transfer", "host"):
        with fake_cuda() as launches:
            settings, algorithm = {"miss": miss}, algorithm_of("sketch")
            engine = FakeEngine(
                launches, algorithm, model(kind), "layer", settings=settings, sinks=sinks
            )
            launches.waits.clear()
            engine.captured()
            assert launches.waits == []
            totals.append(launches.of_layer(LAYER))
            names = [x.name for x in launches.all if x.layer == LAYER]
    copied, called = "aside.aten.copy_", "aside.launch_host_call"
    last = ["aside.promote_tail", "aside.triton.sketch.sketch_kernel"]
    expected = [copied, copied, called, copied, "aside.gather_pages", *last]
    assert [x for x in names if x.startswith("aside.")] == expected
    assert "gather_pages" not in names
    assert names.index("diff_tables") < names.index(called)
    # One launch merges both parts and the sinks, into the model's dtype.
    one = Counter({"triton.attention.merge_kernel": 1})
    merged = [x & one for x in totals]
    assert merged == [one if sinks else Counter(), one]
    more = totals[1] - totals[0] - merged[1]
    assert not [name for name in more if not name.startswith("aside.")]


def test_a_layer_that_shares_a_selection_does_not_select() -> None:
    with fake_cuda() as launches:
        shared = {"reuse_layers": 2}
        algorithm, spec = algorithm_of("dsa"), model("MLA", 1)
        FakeEngine(launches, algorithm, spec, "layer", settings=shared).captured()
        counts = launches.of_layer(LAYER)
    # Layers of a model that shares selections have no index keys to store.
    del counts["triton.index.store_kernel"]
    assert counts.total() == SHARING_LAUNCHES, listed(counts)


def test_an_indexer_scores_a_chunk_in_one_launch() -> None:
    """Whatever its length and that of the prefix, within 64 MiB of scores."""
    prefill = count("dsa", "MLA", "layer").prefill
    assert [n for name, n in prefill.items() if "score" in name] == [1]


@pytest.mark.parametrize(
    ("name", "options", "kind", "kernel", "most"),
    [
        # Of 2,048 blocks of 64 tokens, and of 512 of 16 pages for each of eight KV heads.
        ("dsa", {}, "MLA", "triton.index.score_kernel", {1: 512, 32: 128, 256: 128}),
        ("sketch", {"economy": True}, "GQA", "triton.sketch.outline_kernel", {1: 64, 32: 32}),
    ],
)
def test_a_request_of_a_captured_step_has_programs_that_keep_a_device_busy(
    name: str, options: dict[str, Any], kind: str, kernel: str, most: dict[int, int]
) -> None:
    """No more, however long the longest context is, and each takes at most 16 turns else."""
    config = HiSparseConfig(algorithm=name, algorithm_config=options)
    algorithm = build_algorithm(config)
    spec = model(kind, 1 if name == "dsa" else 16)
    for batch, programs in most.items():
        with fake_cuda() as launches:
            FakeEngine(launches, algorithm, spec, "layer", batch=batch).captured()
            (grid,) = {x.grid for x in launches.all if x.name == kernel}
        assert grid == (programs, *([batch] if name == "dsa" else [8, batch]))


def main() -> None:
    """Print the launches of each case whose algorithm is asked for; without one, the totals."""
    asked = sys.argv[1:]
    for name, kind, scope in cases():
        if asked and name not in asked:
            continue
        counts = count(name, kind, scope)
        steps = {step: getattr(counts, step) for step in Counts._fields[1:]}
        totals = ", ".join(f"{step} {each.total()}" for step, each in steps.items())
        print(f"{name:10} {kind} {scope:8} {totals}")
        if asked:
            print(listed(counts.captured))


if __name__ == "__main__":
    main()
