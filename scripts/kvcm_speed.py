"""Speed of ``hisparse kvcm serve``, beside the limit of its store, and of the Optimizer.

``python -m scripts.kvcm_speed [BLOCKS]`` prints JSON. One client with four connections writes
blocks by gRPC in batches, in two phases, and then matches prefixes; the same records are written to
the store without a manager. It needs a redis-server. Client, manager and Redis share the machine.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import redis

from hisparse.doctor import provenance
from hisparse.kvcm.client import ManagerClient
from hisparse.kvcm.optimizer.policies import POLICIES
from hisparse.kvcm.optimizer.replay import Point, make_setup, replay
from hisparse.kvcm.optimizer.traces import Trace
from hisparse.kvcm.store import open_store
from hisparse_bench.server import free_port

BATCH, PREFIX, MATCHES, CONNECTIONS = 1024, 2048, 300, 4
#: Bytes of a block's record, about.
RECORD = 70


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """The URL of an empty Redis that keeps nothing on disk."""
    program = shutil.which("redis-server") or sys.prefix + "/redis/usr/bin/redis-server"
    port = free_port()
    line = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL) as process:
        try:
            client = redis.Redis(port=port, retry_on_error=[redis.ConnectionError])
            while not _answers(client):
                time.sleep(0.05)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


@contextmanager
def manager(folder: Path, store: str) -> Iterator[tuple[str, psutil.Process]]:
    """Address and process of a new manager."""
    ports = {x: str(free_port()) for x in ("rpc", "http", "admin-rpc", "admin-http")}
    line = [
        sys.executable,
        "-m",
        "hisparse",
        "kvcm",
        "serve",
        "--store",
        store,
        "--root",
        str(folder),
    ]
    line += [x for name, port in ports.items() for x in (f"--{name}-port", port)]
    with subprocess.Popen([*line, "--capacity", "900TB"], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield f"127.0.0.1:{ports['rpc']}", psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(60)


def percentiles(call: Callable[[int], object], count: int) -> dict[str, float]:
    """Milliseconds of calls, one after the other."""
    times = []
    for at in range(count):
        begin = time.perf_counter()
        call(at)
        times.append((time.perf_counter() - begin) * 1e3)
    return {"p50_ms": statistics.median(times), "p99_ms": statistics.quantiles(times, n=100)[98]}


def measure(store: str, folder: Path, blocks: int) -> dict[str, Any]:
    """Figures of a manager with a store."""
    with manager(folder / "files", store) as (address, process):
        clients = [ManagerClient(address, 60.0) for _ in range(CONNECTIONS)]
        clients[0].call(
            "RegisterInstance", instance_group="default", instance_id="i", block_size=16,
            model_deployment={"model_name": "m", "dtype": "bfloat16"},
            location_spec_infos=[{"name": "tp_0", "size": 1 << 20}],
        )  # fmt: skip
        draw = random.Random(7)
        keys = [draw.getrandbits(63) for _ in range(blocks)]
        empty = process.memory_info().rss

        def write(at: int) -> None:
            client, some = clients[at % CONNECTIONS], keys[at * BATCH : (at + 1) * BATCH]
            begun = client.call(
                "StartWriteCache", instance_id="i", block_keys=some, write_timeout_seconds=60
            )
            assert len(begun.locations) == len(some)
            client.call(
                "FinishWriteCache", instance_id="i", write_session_id=begun.write_session_id,
                success_blocks={"offset": len(some)},
            )  # fmt: skip

        begin = time.perf_counter()
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(write, range(-(-blocks // BATCH))))
        seconds = time.perf_counter() - begin
        full = process.memory_info().rss
        prefix = min(PREFIX, blocks)

        def match(at: int) -> None:
            first = draw.randrange(blocks - prefix + 1)
            found = clients[0].call(
                "GetCacheLocation", instance_id="i", block_keys=keys[first : first + prefix],
                query_type="QT_PREFIX_MATCH",
            )  # fmt: skip
            assert len(found.locations) == prefix

        matches = percentiles(match, MATCHES)
        for client in clients:
            client.close()
    return {
        "blocks_per_s": blocks / seconds,
        "prefix_match": {"keys": prefix, **matches},
        "manager_bytes_per_block": (full - empty) / blocks,
    }


def limit(place: str, blocks: int) -> dict[str, Any]:
    """Figures of a store alone: a record for a block, in two writes as a manager makes them."""
    store = open_store(place)
    store.acquire("speed")
    record = random.Random(7).randbytes(RECORD)
    begin = time.perf_counter()
    for first in range(0, blocks, BATCH):
        store.write({blocks + first: record * BATCH})
        numbers = range(first, min(first + BATCH, blocks))
        store.write({blocks + first: None} | dict.fromkeys(numbers, record))
    seconds = time.perf_counter() - begin
    store.close()
    return {"blocks_per_s": blocks / seconds}


def optimizer(requests: int) -> dict[str, Any]:
    """Blocks that replays look up a second: conversations that grow by turns, half of them kept."""
    trace, draw = Trace(file=Path("conversations"), format="mooncake"), random.Random(7)
    system = [draw.getrandbits(63) for _ in range(32)]
    prompts = [list(system) for _ in range(requests // 8 + 1)]
    for at in range(requests):
        prompt = draw.choice(prompts)
        prompt += [draw.getrandbits(63) for _ in range(draw.randrange(1, 24))]
        trace.add("", "i", at * 1000, prompt, len(prompt))
    asked = sum(event.asked or 0 for event in trace.events)
    found: dict[str, Any] = {"lookups": asked, "blocks": trace.num_blocks}
    for policy in POLICIES:
        begin = time.process_time()
        for _ in replay(trace, make_setup(trace), Point(policy, trace.num_blocks // 2)):
            pass
        found[f"{policy}_lookups_per_s"] = asked / (time.process_time() - begin)
    return found


def main() -> None:
    """Print all figures as JSON."""
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    found: dict[str, Any] = {"blocks": blocks, "batch": BATCH}
    found["optimizer"] = optimizer(blocks // 50)
    with TemporaryDirectory() as name:
        folder = Path(name)
        found["sqlite"] = measure(str(folder / "a.db"), folder, blocks)
        found["sqlite"]["store_bytes_per_block"] = (folder / "a.db").stat().st_size / blocks
        found["sqlite alone"] = limit(str(folder / "b.db"), blocks)
        with redis_server(folder) as url:
            client = redis.Redis.from_url(url)
            found["redis"] = measure(url, folder, blocks)
            used = client.info("memory")["used_memory"]
            found["redis"]["store_bytes_per_block"] = used / blocks
            fields = [str(x) for x in range(PREFIX)]
            key = next(x for x in client.scan_iter() if client.type(x) == b"hash")
            alone = percentiles(lambda _: client.hmget(key, fields), MATCHES)
            client.flushall()
            found["redis alone"] = limit(url, blocks) | {"hmget": {"keys": PREFIX, **alone}}
    print(json.dumps(provenance.origin() | {"kvcm": found}, indent=1))


if __name__ == "__main__":
    main()
