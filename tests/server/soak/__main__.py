"""``make soak``: thousands of requests to the real server, and what it must have afterwards.

Every scenario starts a server, asks each prompt alone, sends its share of the requests from many
clients at once, and compares. Then nothing may be held, no memory may have grown, no error may be
in the log, and no process may be left. A store must be whole and within its size.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import disaggregated
import mooncake_master
import psutil
from disaggregated import Pair
from harness import Server
from soak.clients import Difference, send_all
from soak.loras import make_adapters
from soak.scenarios import SCENARIOS, Scenario
from soak.stores import count_pages, store_faults, wait_until_still
from soak.traffic import Traffic, answer_alone, is_rounding

from tests.processes import is_running

#: Prompts of a scenario, each sent again and again; conversations for each hundred requests.
_PROMPTS, _TALKS = 40, 4
_FLAGS = ("--max-total-tokens", "40000", "--max-running-requests", "16")
#: Wrong answers after which a different one is not asked for again.
_WRONG_TRIED = 3
#: Memory may grow by this part after the first requests: allocators keep what the largest batch
#: took. Shorter runs are not judged, for pools grow at their first use.
_GROWTH, _JUDGED = 0.1, 200


@dataclass
class Result:
    """A scenario's row of the report.

    Attributes:
        scenario: its name.
        counts: see :class:`clients.Outcome`.
        faults: a line for each thing that is wrong.
        seconds: the time under load.
        grown_bytes: memory of the processes of the (last) server, or of the pair, after the load,
            less that after the first two fifths of it.
    """

    scenario: str
    counts: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0
    grown_bytes: int = 0

    def judge(self, differences: list[Difference], server: Server) -> None:
        """Count the different answers that rounding explains; the others are wrong."""
        judged: dict[tuple[int, ...], bool] = {}
        for found in differences:
            answer = (len(found.turns[-1].ids), *found.ids)
            # A few wrong answers are enough to look for the cause.
            if answer not in judged and list(judged.values()).count(False) < _WRONG_TRIED:
                judged[answer] = is_rounding(server, found.turns, found.ids, found.cached)
            if judged.get(answer):
                self.add("rounding", 1)
                continue
            self.add("wrong", 1)
            self.faults.append(f"{found.what}: got {found.ids}, expected {found.expected}")

    def add(self, name: str, number: int) -> None:
        """Add to a count."""
        self.counts[name] = self.counts.get(name, 0) + number


def run(scenario: Scenario, num_requests: int, concurrency: int, seed: int, log: Path) -> Result:
    """One scenario, from the start of its server to its end, or of its servers one by one."""
    talks = max(1, num_requests * _TALKS // 100)
    count = min(_PROMPTS, max(8, num_requests // 5))
    adapters = make_adapters(log.with_suffix(".adapters"), scenario.adapters, scenario.model)
    traffic = Traffic.make(count, talks, scenario.longest, seed, adapters)
    result, shared, store = Result(scenario.name), _shared_memory(), log.with_suffix(".store")
    if scenario.pair:
        with _start(scenario, log.with_suffix(".alone"), None, result) as alone:
            answer_alone(alone, traffic)
            with _start_pair(scenario, log, result) as pair:
                _serve(pair, alone, traffic, scenario, num_requests, concurrency, result)
    elif scenario.store is None:
        with _start(scenario, log, None, result) as server:
            answer_alone(server, traffic)
            _serve(server, server, traffic, scenario, num_requests, concurrency, result)
    else:
        ledger = log.with_suffix(".plugin")
        first, half = num_requests // 2, len(traffic.conversations) // 2
        talks_of = (traffic.conversations[:half], traffic.conversations[half:])
        with _start(scenario, log.with_suffix(".alone"), None, result) as alone:
            answer_alone(alone, traffic)
            for number, size in enumerate((first, num_requests - first)):
                part = replace(traffic, conversations=talks_of[number])
                with _start(scenario, log, store, result) as server:
                    _serve(server, alone, part, scenario, size, concurrency, result)
                    wait_until_still(ledger)
        filled = num_requests >= _JUDGED
        result.faults += store_faults(store, scenario.store, result.counts, ledger, filled=filled)
    if left := sorted(_shared_memory() - shared):
        result.faults.append(f"shared memory left: {left}")
    return result


@contextlib.contextmanager
def _start(scenario: Scenario, log: Path, store: Path | None, result: Result) -> Iterator[Server]:
    """A server of the scenario; none of its processes may be left."""
    storage = {} if store is None else {"storage": {"path": str(store), "size": scenario.store}}
    options = {"config": scenario.settings | storage, "forked": False}
    options |= scenario.server_options(log.with_suffix(".plugin"))
    flags = (*_FLAGS, *scenario.command_line)
    with Server(scenario.folder, log, *flags, **options) as server:
        group = _processes(server)
        yield server
    _expect_none(group, result)


@contextlib.contextmanager
def _start_pair(scenario: Scenario, log: Path, result: Result) -> Iterator[Pair]:
    """A prefill and a decode server of the scenario; none of their processes may be left."""
    both: dict[str, Any] = {"config": scenario.settings, "forked": False}
    flags, env = (*_FLAGS, *scenario.command_line), scenario.server_options(log)["env"]
    with disaggregated.running(
        log.parent, log.stem, scenario.model, *flags, prefill=both, decode=both, env=env
    ) as pair:
        group = _processes(pair)
        yield pair
    _expect_none(group, result)


def _expect_none(group: list[psutil.Process], result: Result) -> None:
    """Note the processes that have not ended."""
    # On a busy machine a killed process takes a moment to end.
    end = time.monotonic() + 10
    while (left := [p.pid for p in group if is_running(p)]) and time.monotonic() < end:
        time.sleep(0.1)
    if left:
        result.faults.append(f"processes left: {left}")


def _parts(server: Server | Pair) -> tuple[Server, ...]:
    return (server.prefill, server.decode) if isinstance(server, Pair) else (server,)


def _serve(
    server: Server | Pair,
    alone: Server,
    traffic: Traffic,
    scenario: Scenario,
    num_requests: int,
    concurrency: int,
    result: Result,
) -> None:
    """Send requests to a server, and look at what it holds and logged; ``alone`` judges them."""
    # SGLang's own start logs errors of connections that it tries too early.
    began, started = time.monotonic(), [len(part.log()) for part in _parts(server)]
    _load(server, alone, traffic, scenario, num_requests, concurrency, result)
    result.seconds += time.monotonic() - began
    for part, start in zip(_parts(server), started, strict=True):
        result.faults += _held(part)
        if scenario.store is not None:
            result.faults += count_pages(part, result.counts)
        result.faults += [f"the log has {line!r}" for line in _errors(part.log()[start:])]


def _load(
    server: Server | Pair,
    alone: Server,
    traffic: Traffic,
    scenario: Scenario,
    num_requests: int,
    concurrency: int,
    result: Result,
) -> None:
    """Two fifths of the requests, then the others; memory is read after each part."""
    first = max(len(traffic.conversations) * 2 // 5, 1)
    parts = (traffic.conversations[:first], traffic.conversations[first:])
    sizes = (num_requests * 2 // 5, num_requests - num_requests * 2 // 5)
    memory, group = [], _processes(server)
    for talks, size in zip(parts, sizes, strict=True):
        part = replace(traffic, conversations=talks)
        outcome = send_all(server, part, scenario, size, concurrency)
        for name, number in outcome.counts.items():
            result.add(name, number)
        result.faults += outcome.errors
        result.judge(outcome.differences, alone)
        server.flush_cache()
        memory.append(sum(process.memory_info().rss for process in group))
    result.grown_bytes = memory[1] - memory[0]
    if result.grown_bytes > _GROWTH * memory[0] and num_requests >= _JUDGED:
        result.faults.append(f"memory grew by {result.grown_bytes} bytes")


def _held(server: Server) -> list[str]:
    """What the idle server still holds."""
    names = ("host_tokens_used", "device_tokens_used")
    end = time.monotonic() + 10
    while any(held := server.counted(*names)) and time.monotonic() < end:
        time.sleep(0.2)
    running = server.metrics()["sglang:num_running_reqs"]
    found = dict(zip((*names, "running requests"), (*held, running), strict=True))
    return [f"{name}: {value:g} at the end" for name, value in found.items() if value]


def _errors(log: str) -> list[str]:
    """The last line of each traceback."""
    ends = re.findall(r"Traceback \(most recent call last\):\n(?:.*\n)*?(\S.*)", log)
    return list(dict.fromkeys(ends))


def _processes(server: Server | Pair) -> list[psutil.Process]:
    leaders = [psutil.Process(part.pid) for part in _parts(server)]
    return [each for leader in leaders for each in (leader, *leader.children(recursive=True))]


def _shared_memory() -> set[str]:
    """Names of shared memory, without those that have nothing to do with hisparse.

    SGLang leaves a file of loads, whatever its backend, and queues between ranks when it is killed.
    Semaphores of Python's multiprocessing, which hisparse does not use, may be those of any program
    on the machine.
    """
    foreign = ("sglang_loads_", "sgl_shm_mq_", "sem.mp-")
    return {name for name in os.listdir("/dev/shm") if not name.startswith(foreign)}


def _print_row(result: Result) -> None:
    counts = result.counts
    sent = f"{counts.get('requests', 0)} requests in {result.seconds:.0f} s"
    ended = f"{counts.get('abort', 0)} aborted, {counts.get('disconnect', 0)} hung up"
    verdicts = ", ".join(
        f"{counts.get(name, 0)} {name}"
        for name in ("equal", "tie", "rounding", "not compared", "wrong")
    )
    retracted, grown = counts.get("retracted", 0), result.grown_bytes / 2**20
    loaded = f"{counts['loaded pages']} pages loaded; " if "loaded pages" in counts else ""
    print(
        f"{result.scenario:28s} {sent}; {ended}, {retracted} retracted; {verdicts}; "
        f"{loaded}{grown:+.0f} MiB; {len(result.faults)} faults",
        flush=True,
    )
    for fault in result.faults[:5]:
        print(f"  {fault[:300]}", flush=True)


def _report(results: list[Result], arguments: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "command": "soak",
        "requests": arguments.requests,
        "concurrency": arguments.concurrency,
        "seed": arguments.seed,
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("sglang", "torch")},
        "scenarios": [vars(result) for result in results],
    }


def main() -> int:
    """Run the scenarios and print a row for each; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=5000, help="of all scenarios together")
    parser.add_argument("--concurrency", type=int, default=32, help="clients at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[s.name for s in SCENARIOS], help="one scenario")
    parser.add_argument("--json", type=Path, help="file for the report")
    arguments = parser.parse_args()
    # An exception, so that the server is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results = []
    with tempfile.TemporaryDirectory(prefix="hisparse-soak-") as logs:
        for number, scenario in enumerate(SCENARIOS):
            if arguments.only not in (None, scenario.name):
                continue
            if scenario.pair and not mooncake_master.is_installed():
                print(f"{scenario.name:28s} left out: it needs make mooncake-tools", flush=True)
                continue
            requests = round(scenario.part * arguments.requests)
            log = Path(logs) / f"{number}.log"
            result = run(scenario, requests, arguments.concurrency, arguments.seed + number, log)
            results.append(result)
            _print_row(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(_report(results, arguments), indent=1) + "\n")
    return 1 if any(result.faults for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
