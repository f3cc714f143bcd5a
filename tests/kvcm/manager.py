"""Managers in processes of their own, and clients that speak to them by HTTP or gRPC."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import pytest
import requests
from google.protobuf import json_format

from hisparse.kvcm import wire

ROOT = Path(__file__).parents[2]
LIMIT_S = 30.0
METHODS = {(x.service, x.http_path.removeprefix("/api/")): x for x in chain(*wire.METHODS.values())}

#: Imports the server once and forks a manager for each line, before gRPC has any threads.
_FORKER = """
import asyncio, dataclasses, json, os, signal, sys
from pathlib import Path
from hisparse.kvcm import election
from hisparse.kvcm.server import Ports, serve
from hisparse.kvcm.startup import default_startup

signal.signal(signal.SIGCHLD, signal.SIG_IGN)

def answer(found):
    os.write(1, json.dumps(found).encode() + b"\\n")

for line in sys.stdin:
    asked = json.loads(line)
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if not asked["probes"]:
            election._WORK = [x for x in election._WORK if x[0].__name__ != "probe_storages"]
        def started(ports):
            answer({"pid": os.getpid(), **dataclasses.asdict(ports)})
        startup = default_startup(Path(asked["root"]), asked["capacity"])
        if asked["blocks_per_file"]:
            startup[0].nfs.key_count_per_file = asked["blocks_per_file"]
        startup[1].cache_config.reclaim_strategy.delay_before_delete_ms = asked["delay_ms"]
        share = startup[1].cache_config.reclaim_strategy.trigger_strategy
        share.used_percentage = asked["share"]
        ports = Ports(rpc=asked["rpc"], http=asked["http"], admin_rpc=asked["rpc"],
                      admin_http=asked["http"], **asked["more"])
        try:
            asyncio.run(serve(asked["store"], startup, ports, started))
        except BaseException as error:
            answer({"error": f"{type(error).__name__}: {error}"})
        os._exit(0)
"""


class Forker:
    """Starts managers in 20 ms."""

    def __init__(self) -> None:
        path = os.pathsep.join((str(ROOT), *sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )

    def start(self, **asked: Any) -> dict[str, Any]:
        """The pid and the ports of a new manager, or its error."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Manager:
    """A manager that runs.

    Args:
        forker: starts it.
        folder: of its store and its files.
        store: place of its records; "" for none.
        capacity: bytes of the default group.
        blocks_per_file: of the default storage.
        delay_ms: from removal to deletion.
        share: of a quota above which blocks are reclaimed.
        apart: whether both services have ports of their own.
        probes: whether storages are probed.
        more: fields of ``Ports``.
    """

    def __init__(
        self, forker: Forker, folder: Path, *, store: str = "", capacity: int = 1 << 30,
        blocks_per_file: int = 0, delay_ms: int = 0, share: float = 0.8, apart: bool = True,
        probes: bool = True, **more: Any,
    ) -> None:  # fmt: skip
        self._forker = forker
        self.root = folder / "files"
        self._asked = {
            "store": store, "root": str(self.root), "capacity": capacity, "share": share,
            "blocks_per_file": blocks_per_file, "delay_ms": delay_ms, "rpc": 0, "http": 0,
            "probes": probes, "more": more,
        }  # fmt: skip
        if not apart:
            self._asked |= {"rpc": free_port(), "http": free_port()}
        self.start()

    def start(self) -> None:
        found = self._forker.start(**self._asked)
        assert "error" not in found, found
        self.pid: int = found["pid"]
        self.ports = found
        self.http = Client(self, "http")
        self.grpc = Client(self, "grpc")

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send a signal and wait until the process is gone."""
        self.http.close()
        self.grpc.close()
        os.kill(self.pid, number)
        wait_until(lambda: not Path(f"/proc/{self.pid}").exists())

    def kill(self) -> None:
        self.stop(signal.SIGKILL)


class ManagerError(Exception):
    """A status other than OK.

    Args:
        code: its name.
        message: in words.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Client:
    """Calls methods: ``client.meta("getCacheLocation", instance_id="i")``.

    Args:
        manager: to call.
        transport: "http" or "grpc".
    """

    def __init__(self, manager: Manager, transport: str) -> None:
        self._ports = manager.ports
        self.session = requests.Session()
        self._transport = transport
        self._channels: dict[str, grpc.Channel] = {}

    def url(self, service: str, method: str) -> str:
        port = self._ports[{"meta": "http"}.get(service, f"{service}_http")]
        return f"http://127.0.0.1:{port}/api/{method}"

    def respond(self, service: str, method: str, request: dict[str, Any]) -> dict[str, Any]:
        """The response to a request, both as JSON has them, whatever its status."""
        if self._transport == "http":
            answer = self.session.post(self.url(service, method), json=request, timeout=LIMIT_S)
            assert answer.status_code == 200, (answer.status_code, answer.text)
            found: dict[str, Any] = answer.json()
            return found
        types = METHODS[service, method]
        # json_format takes seconds for what is long.
        long = {x: y for x, y in request.items() if x in ("block_keys", "token_ids", "trace_id")}
        rest = {x: y for x, y in request.items() if x not in long}
        message = json_format.ParseDict(rest, types.request(**long), ignore_unknown_fields=True)
        path = f"/{types.grpc_service}/{types.name}"
        call = self._channel(service).unary_unary(
            path, types.request.SerializeToString, types.response.FromString
        )
        return json_format.MessageToDict(
            call(message, timeout=LIMIT_S),
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
        )

    def _channel(self, service: str) -> grpc.Channel:
        if service not in self._channels:
            port = self._ports["rpc" if service == "meta" else "admin_rpc"]
            self._channels[service] = grpc.insecure_channel(
                f"127.0.0.1:{port}", options=[("grpc.max_receive_message_length", -1)]
            )
        return self._channels[service]

    def meta(self, method: str, **request: Any) -> dict[str, Any]:
        """The response of MetaService; raises if its status is not OK."""
        return self._checked("meta", method, request)

    def admin(self, method: str, **request: Any) -> dict[str, Any]:
        """The same of AdminService."""
        return self._checked("admin", method, request)

    def _checked(self, service: str, method: str, request: dict[str, Any]) -> dict[str, Any]:
        response = self.respond(service, method, request)
        status = response["header"]["status"]
        if status["code"] != "OK":
            raise ManagerError(status["code"], status["message"])
        return response

    def close(self) -> None:
        self.session.close()
        for channel in self._channels.values():
            channel.close()

    # What tests do often.

    def register(self, name: str = "i", **changes: Any) -> None:
        self.meta("registerInstance", **(instance(name) | changes))

    def write(self, keys: list[int], name: str = "i", seconds: int = 30) -> dict[str, Any]:
        """Begin a write."""
        return self.meta(
            "startWriteCache", instance_id=name, block_keys=keys, write_timeout_seconds=seconds
        )

    def finish(self, begun: dict[str, Any], good: list[bool], name: str = "i") -> None:
        self.meta(
            "finishWriteCache",
            instance_id=name,
            write_session_id=begun["write_session_id"],
            success_blocks={"bool_masks": {"values": good}},
        )

    def put(self, keys: list[int], name: str = "i") -> list[str]:
        """Write blocks; the URIs of their first parts."""
        begun = self.write(keys, name)
        self.finish(begun, [True] * len(begun["locations"]), name)
        return uris(begun)

    def match(self, keys: list[int], name: str = "i") -> list[str]:
        """URIs of the first parts of a prefix match."""
        return uris(
            self.meta(
                "getCacheLocation", instance_id=name, block_keys=keys, query_type="QT_PREFIX_MATCH"
            )
        )

    def states(self, keys: list[int], name: str = "i") -> list[str]:
        """``WRITING``, ``SERVING``, ``DELETING`` or ``NOT_FOUND`` of each key."""
        found = self.meta("getCacheMeta", instance_id=name, block_keys=keys)
        return [json.loads(text)["status"].removeprefix("CLS_") for text in found["metas"]]

    def metric(self, name: str, **tags: str) -> float:
        """The value of a metric."""
        for each in self.admin("getMetrics")["metrics"]:
            found = {x["tag_key"]: x["tag_value"] for x in each["metric_tags"]}
            if each["metric_name"] == name and found.items() >= tags.items():
                (value,) = each["metric_value"].values()
                return float(value)
        raise AssertionError(f"no metric {name} {tags}")


def uris(response: dict[str, Any]) -> list[str]:
    return [location["location_specs"][0]["uri"] for location in response["locations"]]


def path_of(uri: str) -> Path:
    """The file of a URI of a storage of type file."""
    return Path("/" + uri.partition("://")[2].partition("/")[2].partition("?")[0])


def store_bytes(uri: str, data: bytes) -> None:
    """Write a block as an engine does."""
    path, _, query = uri.partition("?")
    numbers = dict(part.split("=") for part in query.split("&"))
    assert int(numbers["size"]) == len(data)
    file = path_of(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.pwrite(descriptor, data, int(numbers.get("blkid", 0)) * len(data))
    finally:
        os.close(descriptor)


def instance(name: str = "i") -> dict[str, Any]:
    """A request that registers an instance whose blocks have 64 bytes."""
    return {
        "instance_group": "default",
        "instance_id": name,
        "block_size": 4,
        "model_deployment": {"model_name": "m", "dtype": "bfloat16", "tp_size": 1},
        "location_spec_infos": [{"name": "tp0", "size": 64}],
    }


def group(name: str, **changes: Any) -> dict[str, Any]:
    """A group whose quota has no limit that tests reach."""
    return {
        "name": name,
        "storage_candidates": ["nfs_01"],
        "global_quota_group_name": "q",
        "quota": {"capacity": 1 << 40},
        "cache_config": {
            "reclaim_strategy": {
                "storage_unique_name": "nfs_01",
                "reclaim_policy": "POLICY_LRU",
                "trigger_strategy": {"used_percentage": 0.8},
            },
            "data_storage_strategy": "CPS_PREFER_3FS",
            "meta_indexer_config": {
                "max_key_count": 1 << 20,
                "meta_storage_backend_config": {"storage_type": "local"},
                "meta_cache_policy_config": {"type": "LRU"},
            },
        },
        "version": 1,
    } | changes


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when a condition holds."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "the condition does not hold"
        time.sleep(0.01)


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def running(forker: Forker, folder: Path, **options: Any) -> Iterator[Manager]:
    """A manager that is killed at the end."""
    manager = Manager(forker, folder, **options)
    try:
        yield manager
    finally:
        if Path(f"/proc/{manager.pid}").exists():
            manager.kill()


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """The URL of an empty Redis: the system's, or that of ``make redis-tools``."""
    unpacked = ROOT / ".venv" / "redis"
    folders = os.pathsep.join((os.environ.get("PATH", ""), str(unpacked / "usr/bin")))
    program = shutil.which("redis-server", path=folders)
    if program is None:
        pytest.skip("there is no redis-server: make redis-tools unpacks Debian's")
    port, socket_libraries = free_port(), list((unpacked / "usr/lib").glob("*-linux-gnu"))
    libraries = os.pathsep.join(map(str, socket_libraries))
    process = subprocess.Popen(
        [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""],
        env=os.environ | {"LD_LIBRARY_PATH": libraries},
        stdout=subprocess.DEVNULL,
    )
    try:
        import redis

        client = redis.Redis(port=port)

        def answers() -> bool:
            try:
                return bool(client.ping())
            except redis.ConnectionError:
                return False

        wait_until(answers)
        client.close()
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()
