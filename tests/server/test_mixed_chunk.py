"""``--enable-mixed-chunk``: chunks of prompts and decode steps in one forward of a real server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from checks import alone, of_more_tokens, selected_between
from harness import Server
from parts import MORE
from plugins import make_plugin
from settings import SPARSE, latents
from tiny_models import TOKEN_BYTES, tiny_model
from workload import NEW_TOKENS, PROMPTS, SHARED, tokens

pytestmark = MORE

#: Prints what SGLang mixes, and what hisparse makes of it.
SPY = """
    import logging


    def load():
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        target = "hisparse.engine.batches.MixedBatch.begin"
        HookRegistry.register(target, begin, HookType.AROUND)
        target = "hisparse.engine.batches.DecodeBatch.step"
        HookRegistry.register(target, divide, HookType.AROUND)


    modes = []


    def divide(original, batch, engine):
        step = original(batch, engine)
        modes[:] = sorted(step.by_mode)
        return step


    def begin(original, batch, engine):
        forward = original(batch, engine)
        text = "mixed: %d chunks, %d rows, %s"
        counts = len(batch.prefill.chunks), batch.decode.num_tokens
        logging.getLogger("hisparse").info(text, *counts, " ".join(modes))
        return forward
"""
FLAGS = ("--enable-mixed-chunk", "--chunked-prefill-size", "256")
#: Both event loops of SGLang's scheduler.
LOOPS = pytest.mark.parametrize(
    "loop",
    [
        pytest.param((), id="overlap"),
        pytest.param(("--disable-overlap-schedule",), id="no-overlap", marks=pytest.mark.modes),
    ],
    indirect=True,
)


def make_spy(folder: Path) -> Path:
    """:data:`SPY` as a plug-in."""
    return make_plugin(folder, "spy_mixed:load", SPY)


@pytest.fixture(scope="module")
def spy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_spy(tmp_path_factory.mktemp("spy"))


@pytest.fixture(scope="module")
def loop(request: pytest.FixtureRequest) -> tuple[str, ...]:
    flags: tuple[str, ...] = request.param
    return flags


@pytest.fixture(scope="module")
def sparse(loop: tuple[str, ...], spy: Path, log_dir: Path) -> Iterator[Server]:
    flags = (*FLAGS, *loop, "--max-total-tokens", "40000", "--max-running-requests", "8")
    log = log_dir / f"mixed-sparse{len(loop)}.log"
    with Server(tiny_model("llama"), log, *flags, config=SPARSE, python_path=[spy]) as server:
        yield server


def num_mixed(server: Server, mode: str) -> int:
    """Mixed forwards so far with rows of a mode."""
    return len(re.findall(rf"mixed: \d+ chunks, [1-9]\d* rows,.* {mode}", server.log()))


@LOOPS
def test_sparse_rows_keep_the_tokens_that_they_have_alone(sparse: Server) -> None:
    expected = alone(sparse, PROMPTS.prompts, NEW_TOKENS)
    assert not num_mixed(sparse, "sparse"), "one request mixes with nothing"
    for delay_s in (0.0, 0.1, 0.3):
        sparse.flush_cache()
        answers = sparse.generate_many(PROMPTS.prompts, NEW_TOKENS, delay_s=delay_s)
        assert [a.ids for a in answers] == expected
    assert num_mixed(sparse, "sparse") > 10


@LOOPS
def test_a_row_is_never_attended_as_a_prompt(sparse: Server) -> None:
    """Each of its steps selects: the difference between long and short answers says how many."""
    lengths, mixed = [300, 801, 500, 1500, 900, 2000], num_mixed(sparse, "sparse")
    names = ("hit_pages", "miss_pages", "written_bytes")
    hits, misses, written = of_more_tokens(sparse, lengths, *names, delay_s=0.05)
    assert num_mixed(sparse, "sparse") - mixed > 10
    assert hits + misses == selected_between(lengths)[0]
    assert written == 50 * len(lengths) * TOKEN_BYTES


@LOOPS
def test_a_shared_prefix_gives_what_each_gives_alone(sparse: Server) -> None:
    expected = alone(sparse, SHARED.prompts, NEW_TOKENS)
    answers = sparse.generate_many(SHARED.prompts * 2, NEW_TOKENS, delay_s=0.1)
    assert [a.ids for a in answers] == expected * 2
    assert max(a.cached for a in answers) >= 992


LATENTS = latents(256, 512)


@pytest.mark.modes
@pytest.mark.parametrize("kind", LATENTS)
def test_latents(kind: str, spy: Path, log_dir: Path) -> None:
    """MLA, and DeepSeek-V3.2 with the tokens of its own indexer."""
    prompts = [tokens(n, seed=n) for n in (801, 333, 700, 512)]
    flags = (*FLAGS, "--max-total-tokens", "20000")
    log = log_dir / f"mixed-{kind}.log"
    options = {"python_path": [spy], "env": {"TORCHDYNAMO_DISABLE": "1"}}
    with Server(tiny_model(kind), log, *flags, config=LATENTS[kind], **options) as server:
        expected = alone(server, prompts, NEW_TOKENS)
        answers = server.generate_many(prompts, NEW_TOKENS, delay_s=0.2)
        assert [a.ids for a in answers] == expected
        assert num_mixed(server, "sparse") > 3
