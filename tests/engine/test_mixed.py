"""Chunks of prompts and decode steps in one forward: every request gets what it gets without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hisparse.algorithms.dipr import DIPR
from hisparse.algorithms.dsa import DSA
from hisparse.algorithms.quest import Quest
from hisparse.algorithms.snapkv import SnapKV
from hisparse.engine.batches import MixedBatch
from hisparse.testing import Request, Simulator
from hisparse.testing.recording import ReplayingSimulator
from hisparse.trace import SelectionTrace
from tests.engine.test_replay import REUSE, TIGHT, assert_equal, assert_same, state_of

DENSE_BELOW = 80
SETTINGS = [
    pytest.param({}, id="sketch"),
    pytest.param(
        {"algorithm": Quest(), "scope": "query_head", "kv_cache_dtype": "fp8_e4m3"}, id="quest-fp8"
    ),
    pytest.param(REUSE | {"dense_layers": (0, 3), "max_row": 64}, id="reuse-dense-leaders"),
    pytest.param({"algorithm": DIPR(alpha=0.5)}, id="dipr"),
    pytest.param({"algorithm": SnapKV(window=4)}, id="snapkv-reads-its-context"),
    pytest.param({"min_sparse_context": 1000, "max_row": 64}, id="staged"),
    pytest.param({"min_sparse_context": DENSE_BELOW}, id="dense-and-sparse"),
    pytest.param({"extensions": {"tail_estimate": True}}, id="tail-estimate"),
    pytest.param(REUSE | TIGHT, id="reuse-tight"),
    pytest.param(
        {"scope": "layer", "kv_heads": 1, "head_dim": 24, "latent_rank": 16}, id="latents"
    ),
    pytest.param(
        {"algorithm": DSA(), "scope": "layer", "page_size": 1, "host_pages": 1600}
        | {"num_sink_pages": 0, "num_recent_pages": 0, "staging_pages": 16},
        id="dsa",
    ),
]
WINDOWS = pytest.param({"layers": 4, "windows": (20, 0, 9, 33)}, id="windows")


class Apart(Simulator):
    """Runs the two parts of a mixed batch as two forwards."""

    def mixed(self, parts: Sequence[tuple[Request, int]], *requests: Request) -> list[torch.Tensor]:
        return [*self.prefill(*parts), self.decode(*requests)]


def play(sim: Simulator) -> list[torch.Tensor]:
    """Prompts come in chunks while others decode: pages fill, and one is shared and goes on."""
    one, two = sim.request(1, 190, seed=1, prompt=101), sim.request(2, 190, seed=2, prompt=90)
    outs = sim.prefill((one, 101))
    outs += sim.mixed([(two, 37)], one)
    outs += [sim.decode(one) for _ in range(3)]
    outs += sim.mixed([(two, 53)], one)
    three, four = sim.request(3, 190, seed=3, like=one, shared=96), sim.request(4, 190, seed=4)
    for length in (30, 11, 9, 1, 8, 8, 3, 5):
        outs += sim.mixed([(three, length), (four, 7)], two, one)
    outs += [sim.decode(four, three, one, two) for _ in range(12)]
    sim.end(one)
    again = sim.request(1, 190, seed=5, prompt=120)
    outs += sim.mixed([(again, 70)], two, four, three)
    outs += sim.mixed([(again, 50)], three)
    return outs + [sim.decode(again, three, two) for _ in range(5)]


@pytest.mark.parametrize("settings", [*SETTINGS, WINDOWS])
def test_outputs_and_counters_are_those_of_two_forwards(settings: dict[str, Any]) -> None:
    apart, sim = Apart(**settings), Simulator(**settings)
    assert_equal(play(sim), play(apart))
    got, expected = (vars(x.coordinator.stats()) for x in (sim, apart))
    assert got["selections"] > 0 or "min_sparse_context" in settings
    # What is resident, and so read, depends on the rows' capacities, which are fitted once less.
    free = ("hit_pages", "miss_pages", "decode_read_bytes", "prefill_read_bytes", "extensions")
    assert {k: x for k, x in got.items() if k not in free} == {
        k: x for k, x in expected.items() if k not in free
    }
    assert got["hit_pages"] + got["miss_pages"] == expected["hit_pages"] + expected["miss_pages"]


def test_mixed_forwards_between_replayed_steps() -> None:
    settings = {"min_sparse_context": DENSE_BELOW, "scope": "kv_head"}
    eager, replaying = Simulator(**settings, checked=False), ReplayingSimulator(**settings)
    assert_equal(play(replaying), play(eager))
    assert_same(state_of(replaying), state_of(eager))
    assert replaying.num_replayed > 10


def test_a_sparse_row_leaves_no_exact_page() -> None:
    """A chunk of one token would, which is what SGLang takes the row for."""
    sim = Simulator()
    flags, _ = sim.coordinator.share_pages()
    long, prompt = sim.request(1, 150, seed=1), sim.request(2, 150, seed=2)
    sim.prefill((long, 104))
    for _ in range(9):
        sim.mixed([(prompt, 8)], long)
    pages = torch.tensor(long.host_pages)
    assert flags.read(pages).tolist() == [True] * 13 + [False, False]
    assert flags.read(torch.tensor(prompt.host_pages)).all()


def test_a_trace_has_the_steps_of_mixed_forwards(tmp_path: Path) -> None:
    traces = []
    for number, kind in enumerate((Apart, Simulator)):
        path = str(tmp_path / f"{number}.trace")
        sim = kind(extensions={"trace": path})
        play(sim)
        trace: Any = sim.coordinator.extensions["trace"]
        trace.close()
        read = SelectionTrace(Path(path))
        assert read.end is not None
        assert read.end.dropped_steps == 0
        visits = [x.tolist() for x in (read.requests, read.seq_lens)]
        traces.append((visits, [read.layer(x).tolist() for x in range(2)]))
    assert traces[0] == traces[1]
    assert len(traces[0][0][0]) > 50


def test_a_mixed_forward_that_fails_leaves_nothing_behind() -> None:
    """Nor a step of the requests that decoded."""
    sims = [Simulator() for _ in range(2)]
    outs = []
    for fails, sim in zip((False, True), sims, strict=True):
        one, two, three = (sim.request(slot, 190, seed=slot) for slot in (1, 2, 3))
        sim.prefill((one, 100), (two, 24), (three, 60))
        if fails:
            prefill, decode = sim.next_chunks((two, 20)), sim.next_tokens(one)
            one.done, two.done = one.done - 1, two.done - 20
            sim.coordinator.forward_begin(MixedBatch(prefill=prefill, decode=decode))
            sim.coordinator.attention(0, *(x[0, :21] for x in (two.q, two.k, two.v)))
            sim.coordinator.forward_abort()
        outs.append(sim.decode(three))
        for request in (one, two):
            sim.end(request, free=True)
        four = sim.request(2, 190, seed=4)
        outs[-1] = [outs[-1], *sim.prefill((four, 70)), sim.decode(four, three)]
    assert_equal(outs[1], outs[0])
