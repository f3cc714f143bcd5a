"""Managers that tests share."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kvcm.manager import ROOT, Client, Forker, Manager, free_port, running, wait_until


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    forker = Forker()
    yield forker
    forker.close()


@pytest.fixture(scope="module")
def shared(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    """A manager that keeps nothing."""
    with running(forker, tmp_path_factory.mktemp("kvcm")) as manager:
        yield manager


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, shared: Manager) -> Client:
    """A client of the shared manager."""
    found: Client = getattr(shared, request.param)
    return found


_NAMES = map("i{}".format, itertools.count())


@pytest.fixture
def name(client: Client) -> str:
    """An instance of this test's own."""
    name = next(_NAMES)
    client.register(name)
    return name


@pytest.fixture
def managers(forker: Forker, tmp_path: Path) -> Iterator[object]:
    """A function that starts managers of this test's own, with options of ``Manager``."""
    started: list[Manager] = []

    def start(**options: object) -> Manager:
        started.append(Manager(forker, tmp_path, **options))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for manager in started:
        if Path(f"/proc/{manager.pid}").exists():
            manager.kill()


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    """An empty Redis: the system's, or that of ``make redis-tools``."""
    unpacked = ROOT / ".venv" / "redis"
    folders = os.pathsep.join((os.environ.get("PATH", ""), str(unpacked / "usr/bin")))
    program = shutil.which("redis-server", path=folders)
    if program is None:
        pytest.skip("there is no redis-server: make redis-tools unpacks Debian's")
    port, socket_libraries = free_port(), list((unpacked / "usr/lib").glob("*-linux-gnu"))
    libraries = os.pathsep.join(map(str, socket_libraries))
    process = subprocess.Popen(
        [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path), "--save", ""],
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
