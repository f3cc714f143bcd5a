"""Managers that tests share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kvcm.manager import Client, Forker, Manager, redis_server, running


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
    """An empty Redis."""
    with redis_server(tmp_path) as url:
        yield url
