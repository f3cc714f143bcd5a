"""``--dp-size``: each replica has a share of host memory, and gives one process's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checks import assert_nothing_held, wait_until
from harness import Server
from parts import MORE
from settings import SMALL_ROWS, TWO_RANKS
from tiny_models import TOKEN_BYTES, tiny_model
from workload import tokens

pytestmark = MORE

NEW_TOKENS = 24
PAGE, REPLICAS = 16, 2
HOST_BYTES = 40 * 2**20
CONFIG = SMALL_ROWS | {"host_memory": HOST_BYTES, "checked": True}
FLAGS = ("--chunked-prefill-size", "256", "--max-running-requests", "8")
PROMPTS = [tokens(n, seed=n) for n in (50, 333, 801, 1500, 2000)]


@pytest.fixture(scope="module")
def alone(log_dir: Path) -> list[list[int]]:
    """Tokens of each prompt on one process, one after the other."""
    with Server(tiny_model("llama"), log_dir / "replica-alone.log", *FLAGS, config=CONFIG) as one:
        return [one.generate(prompt, NEW_TOKENS).ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the store, which the replicas share, and for their traces."""
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def server(alone: object, folder: Path, log_dir: Path) -> Iterator[Server]:
    config = CONFIG | {
        "storage": {"path": str(folder / "store"), "size": "64MiB"},
        "trace": {"path": str(folder / "selections.trace"), "max_bytes": "64MiB"},
    }
    flags = (*FLAGS, "--dp-size", str(REPLICAS))
    log = log_dir / "replicas.log"
    with Server(tiny_model("llama"), log, *flags, config=config, env=TWO_RANKS) as running:
        yield running


def test_each_replica_gives_one_process_s_tokens(server: Server, alone: list[list[int]]) -> None:
    """All prompts at once, sent to whichever; then to each replica, whose radix cache has them."""
    assert [a.ids for a in server.generate_many(PROMPTS, NEW_TOKENS)] == alone
    for replica in range(REPLICAS):
        answers = server.generate_many(PROMPTS, NEW_TOKENS, routed_dp_rank=replica)
        assert [answer.ids for answer in answers] == alone
        again = server.generate_many(PROMPTS, NEW_TOKENS, routed_dp_rank=replica)
        assert [answer.ids for answer in again] == alone
        assert [answer.cached for answer in again] == [
            (len(prompt) - 1) // PAGE * PAGE for prompt in PROMPTS
        ]


def test_the_replicas_divide_host_memory(server: Server) -> None:
    pages = HOST_BYTES // REPLICAS // (PAGE * TOKEN_BYTES)
    assert server.counted_by("dp_rank", "host_kv_bytes") == {
        "0": pages * PAGE * TOKEN_BYTES,
        "1": pages * PAGE * TOKEN_BYTES,
    }
    assert server.counted_by("dp_rank", "host_tokens_total") == dict.fromkeys(
        "01", (pages - 1) * PAGE
    )


def test_a_replica_reads_what_another_has_stored(server: Server) -> None:
    prompt = tokens(900, seed=17)
    name = "storage_offloaded_pages"
    before = server.counted_by("dp_rank", name)
    first = server.generate(prompt, NEW_TOKENS, routed_dp_rank=0)
    wait_until(
        lambda: server.counted_by("dp_rank", name)["0"] >= before["0"] + 900 // PAGE,
        "the store did not get the prompt",
    )
    second = server.generate(prompt, NEW_TOKENS, routed_dp_rank=1)
    assert (first.cached, second.cached) == (0, 900 // PAGE * PAGE)
    assert second.ids == first.ids
    assert server.counted_by("dp_rank", "storage_loaded_pages_total")["1"] >= 900 // PAGE


def test_an_aborted_request_leaves_nothing_in_its_replica(server: Server) -> None:
    for seed in range(4):
        server.abort_after(tokens(700, seed=seed + 40), 5, 400)
    assert_nothing_held(server)


def test_each_replica_writes_a_trace_of_its_own(server: Server, folder: Path) -> None:
    assert len(list(folder.glob("selections*.trace"))) == REPLICAS
    assert all(steps > 0 for steps in server.counted_by("dp_rank", "trace_steps_total").values())
