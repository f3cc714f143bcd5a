"""Limits and killed processes: one line or a clean end, nothing left, and the next start works."""

from __future__ import annotations

import os
import shutil
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from checks import assert_nothing_held, wait_until
from harness import Answer, Server
from hugging_face import sparse_tokens
from plugins import make_plugin
from settings import SPARSE
from tiny_models import tiny_model
from workload import tokens

from tests.processes import is_running
from tests.sizes import PART

FLAGS = ("--max-total-tokens", "40000", "--max-running-requests", "8")
LONG = PART == "faults"
ROLES = ["scheduler", "tokenizer", "detokenizer"]
PROMPTS = [tokens(500, seed=s) for s in range(700, 706)]


@pytest.mark.skipif(not LONG, reason="one more server: make test-all PART=faults")
def test_a_limit_of_addresses_ends_the_start_with_one_line(tmp_path: Path) -> None:
    """As `ulimit -v` or a batch system sets it: free memory is there, and the kernel refuses it."""
    log = tmp_path / "log"
    config = SPARSE | {"host_memory": 0.5}
    limit = """
        import os, resource

        def limit() -> None:
            pages = int(open("/proc/self/statm").read().split()[0])
            mapped = pages * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (mapped + (3 << 28), resource.RLIM_INFINITY))
    """
    folder = make_plugin(tmp_path / "plugin", "limit:limit", limit)
    server = Server(tiny_model("llama"), log, config=config, python_path=[folder])
    line = server.refusal()
    assert "host memory: " in line and " (ulimit -v)" in line


def shared_memory() -> set[str]:
    """Files in shared memory, without those that are not hisparse's.

    SGLang leaves one of each server that is killed, with any backend, and has queues there while a
    server runs. Semaphores are of Python's multiprocessing. Other tests use both meanwhile.
    """
    foreign = ("sglang_loads_", "sgl_shm_mq_", "sem.mp-")
    return {name for name in os.listdir("/dev/shm") if not name.startswith(foreign)}


def processes_of(server: Server) -> dict[str, psutil.Process]:
    """The processes of a server by role; SGLang starts them in this order."""
    first = psutil.Process(server._process.pid)
    children = sorted(first.children(recursive=True), key=lambda x: x.pid)
    return dict(zip(("tokenizer", "scheduler", "detokenizer"), [first, *children], strict=True))


def under_load(server: Server, pool: ThreadPoolExecutor) -> list[Future[Answer]]:
    """Requests that run for long, after each has begun."""
    waiting = [pool.submit(server.generate, prompt, 4000) for prompt in PROMPTS]
    held = len(PROMPTS) * SPARSE["budget"]
    wait_until(lambda: server.counted("device_tokens_used")[0] >= held, "requests did not begin")
    return waiting


@pytest.fixture(scope="module")
def right() -> list[int]:
    """What hisparse's cache gives in this process."""
    (found,) = sparse_tokens("llama", PROMPTS[:1], 20, SPARSE)
    return found


@pytest.mark.parametrize("role", ROLES if LONG else ROLES[:1])
def test_a_process_that_is_killed_under_load(role: str, right: list[int], log_dir: Path) -> None:
    model, log, before = tiny_model("llama"), log_dir / f"killed-{role}.log", shared_memory()
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        with Server(model, log, *FLAGS, config=SPARSE) as server:
            waiting = under_load(server, pool)
            processes = processes_of(server)
            processes[role].send_signal(signal.SIGKILL)
            end = time.monotonic() + 60
            while left := [x for x in processes.values() if is_running(x)]:
                server._process.poll()
                assert time.monotonic() < end, f"still there: {left}"
                time.sleep(0.1)
        assert all(future.exception() is not None for future in waiting)
    assert shared_memory() <= before
    if LONG:
        with Server(model, log, *FLAGS, config=SPARSE) as server:
            assert server.generate(PROMPTS[0], 20).ids == right


@pytest.mark.skipif(not LONG, reason="builds all kernels: make test-all PART=faults")
def test_two_servers_that_start_at_once_with_an_empty_kernel_cache(
    tmp_path: Path, right: list[int]
) -> None:
    """One builds while the other waits, or both do; the kernels are slow ones, built in seconds."""
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" -O0\n')
    compiler.chmod(0o755)
    env = {"HOME": str(tmp_path), "CXX": str(compiler)}
    model = tiny_model("llama")
    servers = [
        Server(model, tmp_path / f"log{i}", *FLAGS, config=SPARSE, env=env, forked=False)
        for i in range(2)
    ]
    with ThreadPoolExecutor(2) as pool:
        started = [pool.submit(server.__enter__) for server in servers]
        try:
            assert [x.result().generate(PROMPTS[0], 20).ids for x in started] == [right] * 2
        finally:
            for server in servers:
                server.stop()
    cache = tmp_path / ".cache" / "hisparse" / "kernels"
    assert len(list(cache.glob("cpu-*.so"))) == 1
    assert not list(cache.glob("*.unfinished-*"))
    said = "".join(server.log() for server in servers)
    assert said.count("hisparse: building CPU kernels") == 1
    assert "kernels are off" not in said


def test_a_clock_that_jumps_while_requests_run(
    tmp_path: Path, right: list[int], log_dir: Path
) -> None:
    """Each reading of the clock on the wall is up to an hour off, in all processes.

    In ``make test`` this is also the next start after a killed process.
    """
    jump = """
        import random, time

        def jump() -> None:
            now, rng = time.time, random.Random(0)
            time.time = lambda: now() + rng.uniform(-3600, 3600)
    """
    folder = make_plugin(tmp_path, "jump:jump", jump)
    log = log_dir / "clock.log"
    with Server(tiny_model("llama"), log, *FLAGS, config=SPARSE, python_path=[folder]) as server:
        assert server.generate(PROMPTS[0], 20).ids == right
        answers = server.generate_many(PROMPTS, 20)
        assert answers[0].ids == right
        assert_nothing_held(server)
