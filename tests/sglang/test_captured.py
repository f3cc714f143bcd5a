"""The backend under SGLang's runners, with padding and with recorded operations for CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.algorithms.quest import Quest
from hisparse.algorithms.sketch import Sketch
from hisparse.engine.batches import StaticBatch
from hisparse.sglang.backend import HiSparseAttnBackend
from hisparse.testing import Simulator
from hisparse.testing.operations import Violation
from tests.sglang.graph_runner import Runner, server


class Pair:
    """Requests under SGLang's runner, and the same ones in eager steps without SGLang."""

    def __init__(self, runner: Runner, prompts: tuple[int, ...], **settings: Any) -> None:
        self.runner, self.expected = runner, Simulator(checked=False, **settings)
        slots = range(1, len(prompts) + 1)
        self.mine = [runner.request(slot, seed=slot) for slot in slots]
        self.theirs = [self.expected.request(slot, 190, seed=slot) for slot in slots]
        for sim, own in ((runner.sim, self.mine), (self.expected, self.theirs)):
            for request, prompt in zip(own, prompts, strict=True):
                sim.prefill((request, prompt))

    def step(self, *some: int, **options: Any) -> None:
        """A decode step of requests by number, whose outputs have to be equal."""
        out = self.runner.decode(*(self.mine[i] for i in some), **options)
        assert torch.equal(out, by_token(self.expected.decode(*(self.theirs[i] for i in some))))

    def check_counts(self) -> None:
        assert self.runner.sim.coordinator.stats() == self.expected.coordinator.stats()


def by_token(out: Tensor) -> Tensor:
    """``[L, T, Hq, D]`` -> ``[T, L * Hq * D]``"""
    return out.movedim(0, 1).flatten(1)


Start = Callable[..., Runner]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a runner with these settings."""
    with ExitStack() as stack:

        def runner(arguments: dict[str, Any] | None = None, **settings: Any) -> Runner:
            args = stack.enter_context(server(**arguments or {}))
            return Runner(monkeypatch, args, **settings)

        yield runner


@pytest.mark.parametrize(
    "settings",
    [{"algorithm": Quest()}, {"algorithm": Sketch(), "min_sparse_context": 64}],
    ids=["quest", "sketch-and-dense-contexts"],
)
def test_graphs_of_several_sizes_and_eager_steps_give_the_eager_tokens(
    settings: dict[str, Any], start: Start
) -> None:
    runner = start(**settings)
    pair = Pair(runner, (101, 30, 59), **settings)
    for step in range(40):
        # One, two or three requests; a graph of four serves three.
        pair.step(*[(0,), (2, 0), (0, 1, 2)][step % 3], eager=step % 7 == 6)
    pair.check_counts()
    assert runner.num_replays == 35
    assert runner.reports == 40


def test_padding_of_eager_batches_changes_nothing(start: Start) -> None:
    """SGLang pads the batches of a forward if ranks exchange tokens (--moe-a2a-backend)."""
    runner, expected = start(sizes=(1,)), Simulator(checked=False)
    mine = [runner.request(slot, seed=slot) for slot in (1, 2)]
    theirs = [expected.request(slot, 190, seed=slot) for slot in (1, 2)]
    for one, other in zip(mine, theirs, strict=True):
        for count, padding in ((37, 3), (63, 0), (20, 5)):
            (wanted,) = expected.prefill((other, count))
            assert torch.equal(runner.prefill(one, count, padding), by_token(wanted))
    for step in range(20):
        out = runner.decode(*mine, eager=True, padding=step % 3)
        assert torch.equal(out, by_token(expected.decode(*theirs))), f"step {step}"
    assert runner.sim.coordinator.stats() == expected.coordinator.stats()


@pytest.mark.parametrize("scope", ["layer", "kv_head"])
@pytest.mark.parametrize(
    "settings",
    [
        {"min_sparse_context": 120, "device_buffer": 64, "max_row": 96},
        {"dense_layers": (1,), "max_row": 128},
    ],
    ids=["dense-contexts", "dense-layers"],
)
def test_steps_that_a_graph_cannot_serve_run_eagerly(
    settings: dict[str, Any], scope: str, start: Start
) -> None:
    """A dense context that is too long for its row is read in tiles, in that layer."""
    settings = settings | {"scope": scope}
    runner = start(sizes=(2,), **settings)
    pair = Pair(runner, (80, 105), **settings)
    for step in range(40):
        pair.step(*range(step % 4 == 3, 2))
    assert 0 < runner.num_replays < 40
    pair.check_counts()


def test_a_capture_between_steps_changes_no_request(start: Start) -> None:
    """SGLang captures anew while it serves: after an update of weights, and for other sizes."""
    runner = start(sizes=(3,))
    pair = Pair(runner, (101, 30, 59))
    for capture in (runner.graphs.capture, lambda: runner.capture((2, 4)), list):
        for step in range(9):
            pair.step(*range(1 + step % 3))
        capture()
    pair.check_counts()
    assert runner.num_replays == 27


def test_ranks_that_exchange_tokens_replay_if_all_of_them_can(start: Start) -> None:
    """SGLang then requires a vote of the ranks, and pads tables of tokens a rank."""
    runner = start(arguments={"moe_dense_tp_size": 1}, sizes=(2,))
    assert runner.graphs.require_mlp_sync
    pair = Pair(runner, (101, 30))
    for step in range(12):
        pair.step(*range(1 + step % 2), graph_vote=step % 3 > 0)
    pair.check_counts()
    assert runner.num_replays == 8


def reads_a_length(backend: Any, batch: Any) -> None:
    init_in_graph(backend, batch)
    int(batch.seq_lens.max())


def makes_a_tensor(backend: Any, batch: Any) -> None:
    init_in_graph(backend, batch)
    batch.seq_lens.add_(torch.tensor([batch.batch_size]))


init_in_graph, load = HiSparseAttnBackend.init_forward_metadata_in_graph, StaticBatch.load


@pytest.mark.parametrize(
    "defect, message",
    [(reads_a_length, r"int\(tensor"), (makes_a_tensor, "made from host values")],
)
def test_a_backend_that_needs_the_host_is_not_captured(
    defect: Callable[..., None], message: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HiSparseAttnBackend, "init_forward_metadata_in_graph", defect)
    with pytest.raises(Violation, match=message):
        start(sizes=(2,))


def counts_old_rows(static: Any, batch: Any) -> None:
    """Rows after the requests are those of the step before, and not marked as padding."""
    rows = static._rows.clone()
    load(static, batch)
    if batch is not None:
        static._rows[:, len(batch.slots) :] = rows[:, len(batch.slots) :]
        static._num_real.fill_(rows.shape[1])


def captures_requests(static: Any, batch: Any) -> None:
    """A capture runs its warm-ups on the requests of the last step."""
    if batch is not None or not static._num_real:
        load(static, batch)


@pytest.mark.parametrize("defect", [counts_old_rows, captures_requests])
def test_requests_in_rows_of_padding_are_found(
    defect: Callable[..., None], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StaticBatch, "load", defect)
    runner = start(sizes=(2,))
    pair = Pair(runner, (101, 30))

    def serve() -> None:
        pair.step(0, 1)
        pair.step(0)
        runner.graphs.capture()
        pair.step(0, 1)
        pair.check_counts()

    with pytest.raises(AssertionError):
        serve()
