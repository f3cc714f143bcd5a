"""Every transfer is delayed: nothing may be read before it was written, or reused too early.

What runs on side streams is done as late as their joins allow.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import Server
from plugins import make_plugin
from tiny_models import tiny_model
from workload import NEW_TOKENS, PROMPTS, SHARED, DenseTokens

_SLOW = '''
    """Every transfer of hisparse sleeps before it moves anything; side work waits for its join."""

    import functools, os, random, time

    import hisparse.cache.kv_io as transfers
    import hisparse.cache.manager as manager
    from tests.delayed import DelayedStreams

    NAMES = ("gather_pages", "gather_tokens", "scatter_tokens")


    def slow(name, transfer):
        @functools.wraps(transfer)
        def late(*args, **kwargs):
            time.sleep(random.uniform(0.0, 0.006))
            with open(os.environ["SLOW_TRANSFERS"], "a") as seen:
                seen.write(name + "\\n")
            return transfer(*args, **kwargs)

        return late


    def late_streams(device):
        with open(os.environ["SLOW_TRANSFERS"], "a") as seen:
            seen.write("late_streams\\n")
        return DelayedStreams("late")


    def install():
        manager.make_streams = late_streams
        for name in NAMES:
            setattr(transfers, name, slow(name, getattr(transfers, name)))
'''

CONFIG = {
    "budget": 4096,
    "host_memory": "1GiB",
    "device_memory": "300MB",
    "staging_bytes": 65536,
    "overlap": True,
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gets a line for each transfer that was delayed."""
    return tmp_path_factory.mktemp("slow") / "seen.txt"


@pytest.fixture(scope="module")
def slow_server(log_dir: Path, seen: Path) -> Iterator[Server]:
    folder = make_plugin(seen.parent / "plugin", "slow_transfers:install", _SLOW)
    flags = ("--max-total-tokens", "20000", "--chunked-prefill-size", "256")
    with Server(
        tiny_model("llama"),
        log_dir / "slow.log",
        *flags,
        config=CONFIG,
        python_path=[folder, Path(__file__).parents[2]],
        env={"SLOW_TRANSFERS": str(seen)},
    ) as server:
        yield server


def test_the_delays_are_in_place(slow_server: Server, seen: Path) -> None:
    slow_server.generate(SHARED.prompts[0], 2)
    slow_server.generate(SHARED.prompts[1], 2)
    assert set(seen.read_text().split()) >= {
        "gather_pages",
        "scatter_tokens",
        "late_streams",
    }


@pytest.mark.parametrize("seed", range(2))
def test_chunks_radix_hits_duplicates_and_an_abort_with_slow_transfers(
    slow_server: Server, dense_tokens: DenseTokens, seed: int
) -> None:
    """A long prompt in chunks, its duplicate, prompts that share a prefix, the abort of one."""
    slow_server.flush_cache()
    expected = dense_tokens("llama", SHARED) + dense_tokens("llama", PROMPTS)[-2:]
    prompts = SHARED.prompts + PROMPTS.prompts[-2:]
    order = [*range(len(prompts)), *range(len(prompts))]
    random.Random(seed).shuffle(order)
    with ThreadPoolExecutor(1) as thread:
        aborted = thread.submit(slow_server.abort_after, prompts[1], 4, 1000)
        answers = slow_server.generate_many([prompts[i] for i in order], NEW_TOKENS, delay_s=0.15)
        assert len(aborted.result()) < 1000
    assert [a.ids for a in answers] == [expected[i] for i in order]
    assert sum(a.cached > 0 for a in answers) >= 5, "too few radix hits to show anything"
