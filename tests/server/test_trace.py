"""A server records what it selected and, by SGLang's export, which prefixes it was asked for."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from harness import Server
from tiny_models import LAYERS, tiny_model
from workload import tokens

from hisparse.errors import ConfigError
from hisparse.trace import SelectionTrace, replay_hits
from hisparse.trace.prefix import PrefixTrace, convert_sglang
from tests.sizes import SWEEPS

PAGE, BUDGET, PROMPT, STEPS = 16, 128, 800, 24


def config(path: Path) -> dict[str, object]:
    """Configuration of a server that records into ``path``."""
    return {
        "budget": BUDGET,
        "max_row_capacity": 2 * BUDGET,
        "host_memory": "1GiB",
        "device_memory": "14MB",
        "trace": str(path),
    }


def wait_for_steps(path: Path, count: int) -> None:
    """Until the trace has so many steps."""
    for _ in range(600):
        with suppress(ConfigError):
            if len(SelectionTrace(path).requests) >= count:
                return
        time.sleep(0.1)
    raise AssertionError(f"the trace has fewer than {count} steps")


def exported(folder: Path, count: int) -> PrefixTrace:
    """What the server wrote, once it has written all requests: it answers first."""
    for _ in range(600):
        files = sorted(folder.glob("*.log"))
        if sum(len(file.read_text().splitlines()) for file in files) >= count:
            return convert_sglang(files, PAGE, None)
        time.sleep(0.1)
    raise AssertionError(f"the server exported fewer than {count} requests")


def test_a_server_records_selections_and_prefixes(log_dir: Path, tmp_path: Path) -> None:
    path, folder = tmp_path / "server.trace", tmp_path / "requests"
    flags = ("--max-total-tokens", "8000", "--export-metrics-to-file")
    flags += ("--export-metrics-to-file-dir", str(folder), "--enable-metrics")
    prompt, other = tokens(PROMPT, seed=1), tokens(PROMPT, seed=2)
    log = log_dir / "trace.log"
    with Server(tiny_model("llama"), log, *flags, config=config(path)) as server:
        for ids in (prompt, other, prompt):
            server.generate(ids, STEPS)
        handed, dropped = server.counted("trace_steps", "trace_dropped_steps")
        selected = sum(server.counted("hit_pages", "miss_pages"))
        requests = exported(folder, 3).requests
        wait_for_steps(path, int(handed))
    # The server was killed.
    trace = SelectionTrace(path)
    count = len(trace.requests)
    assert trace.end is None
    assert (count, dropped) == (handed, 0)
    assert count == 3 * (STEPS - 1)
    assert list(trace.header.layers) == list(range(LAYERS))
    assert trace.requests.tolist() == [i // (STEPS - 1) for i in range(count)]
    assert trace.seq_lens[0] == PROMPT + 1
    found = replay_hits(trace, [2 * BUDGET])
    assert sum((trace.layer(x) >= 0).sum() for x in range(LAYERS)) == selected
    assert 0 < found["hits"][0] < selected
    first, second, again = requests
    assert first.hash_ids == again.hash_ids
    assert not set(first.hash_ids) & set(second.hash_ids)
    assert (first.cached_length, second.cached_length) == (0, 0)
    # A server computes the last token of a prompt anew, and so its page.
    assert again.cached_length == PROMPT - PAGE


@pytest.mark.sweeps
@pytest.mark.skipif(not SWEEPS, reason="a server of its own: make test-all PART=sweeps")
def test_sigterm_lets_an_answer_end_and_completes_the_trace(log_dir: Path, tmp_path: Path) -> None:
    path, prompt = tmp_path / "server.trace", tokens(PROMPT, seed=1)
    log = log_dir / "sigterm.log"
    flags = ("--max-total-tokens", "8000")
    # A fork does not end as a process of a real server does.
    server = Server(tiny_model("llama"), log, *flags, config=config(path), forked=False)
    with server:
        right = server.generate(prompt, STEPS).ids
        with server.stream(prompt, STEPS) as events:
            next(events)
            os.kill(server.pid, signal.SIGTERM)
            for event in events:
                ids = event["output_ids"]
        assert ids == right
        server.wait_until_gone()
        assert "hisparse: error" not in server.log()
    trace = SelectionTrace(path)
    assert trace.end is not None
    assert (trace.end.dropped_steps, trace.end.reason) == (0, "closed")
    assert len(trace.requests) == 2 * (STEPS - 1)
