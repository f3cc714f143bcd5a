"""Several managers of one store: one leads, the others take over."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hisparse.kvcm.election import Node
from hisparse.kvcm.startup import default_startup
from hisparse.kvcm.store import Store
from tests.kvcm.manager import Manager, ManagerError, instance, wait_until

Start = Callable[..., Manager]


def _leads(manager: Manager) -> bool:
    return bool(manager.http.admin("checkHealth")["is_leader"])


def _info(manager: Manager) -> dict[str, Any]:
    return manager.grpc.admin("getManagerClusterInfo")


@pytest.fixture(params=["file", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "redis":
        return f"{request.getfixturevalue('redis_url')}?cluster_name=a"
    return str(tmp_path / "db")


def test_a_leader_that_is_killed(managers: Start, place: str) -> None:
    first, second = managers(store=place), managers(store=place)
    first.http.register()
    (uri,) = first.http.put([1])
    assert _leads(first) and not _leads(second)
    assert second.http.admin("checkHealth")["is_health"]
    leader = _info(first)["self_node_id"]
    assert leader.startswith(f"127.0.0.1:{first.ports['admin_http']}_")
    assert _info(second)["leader_node_id"] == leader != _info(second)["self_node_id"]
    assert _info(second)["self_leader_expiration_time"] == "0"
    left = int(_info(first)["self_leader_expiration_time"]) / 1e6 - time.time()
    assert 0 < left <= 6
    for client in (second.http, second.grpc):
        with pytest.raises(ManagerError, match=f"SERVER_NOT_LEADER: .*the leader: {leader}"):
            client.match([1])
        with pytest.raises(ManagerError, match="SERVER_NOT_LEADER"):
            client.admin("listStorage")
    first.kill()
    begin = time.monotonic()
    wait_until(lambda: _leads(second))
    assert time.monotonic() - begin < 6
    assert second.http.match([1]) == [uri]
    first.start()
    assert not _leads(first)
    assert _info(first)["leader_node_id"] == _info(second)["self_node_id"]


def test_a_leader_that_hangs(managers: Start, redis_url: str) -> None:
    """Another leads within the lease; the old one answers no more from what it remembers."""
    first, second = managers(store=redis_url), managers(store=redis_url)
    first.http.register()
    first.http.put([1])
    os.kill(first.pid, signal.SIGSTOP)
    begin = time.monotonic()
    wait_until(lambda: _leads(second))
    assert 3 < time.monotonic() - begin < 7
    second.http.put([2])
    os.kill(first.pid, signal.SIGCONT)
    with pytest.raises(ManagerError, match="SERVER_NOT_LEADER"):
        first.grpc.match([1])  # HTTP closed its connection.
    wait_until(lambda: _info(first)["leader_node_id"] == _info(second)["self_node_id"])
    assert len(second.http.match([2, 1])) == 2


def test_a_leader_that_is_demoted(managers: Start, place: str) -> None:
    first, second = managers(store=place), managers(store=place)
    first.http.register()
    first.http.put([1])
    with pytest.raises(ManagerError, match="SERVER_NOT_LEADER"):
        second.http.admin("leaderDemote")
    first.http.admin("updateLeaderElectorConfig", campaign_delay_time_ms=1500)
    found = first.grpc.admin("getLeaderElectorConfig")["campaign_delay_time_ms"]
    assert found == "1500"
    begin = time.monotonic()
    first.http.admin("leaderDemote")
    assert not _leads(first)
    wait_until(lambda: _leads(second))
    assert second.http.match([1])
    second.http.admin("updateLeaderElectorConfig", campaign_delay_time_ms=60_000)
    second.grpc.admin("leaderDemote")
    wait_until(lambda: _leads(first))
    assert time.monotonic() - begin >= 1.5
    assert first.http.match([1])


class _Fails(Store):
    """Cannot be read at first."""

    fails = True
    renewed = 0

    def load(self) -> Any:
        if self.fails:
            raise ValueError("no answer")
        return iter(())

    def renew(self) -> None:
        self.renewed += 1


def test_a_store_that_fails_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given up, and got again later."""
    monkeypatch.setattr("hisparse.kvcm.store._RENEW_S", 0.01)
    store = _Fails()

    async def run() -> None:
        node = Node(store, default_startup(tmp_path, 1 << 20))
        running = asyncio.create_task(node.run())
        await asyncio.sleep(0.5)
        assert node.state is None
        before = store.renewed
        await asyncio.sleep(0.1)
        assert store.renewed == before
        store.fails = False
        while node.state is None:
            await asyncio.sleep(0.05)
        running.cancel()
        await node.step_down()

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize("delay", [-1, 86_400_001])
def test_a_delay_that_is_none(managers: Start, delay: int) -> None:
    with pytest.raises(ManagerError, match=f"INVALID_ARGUMENT: .*: got {delay}, expected 0 to"):
        managers().http.admin("updateLeaderElectorConfig", campaign_delay_time_ms=delay)


def test_stores_of_one_redis(managers: Start, redis_url: str) -> None:
    one, other = (managers(store=f"{redis_url}?cluster_name={x}") for x in ("one", "other"))
    one.http.register()
    one.http.put([1])
    assert _leads(one) and _leads(other)
    with pytest.raises(ManagerError, match="INSTANCE_NOT_EXIST"):
        other.http.match([1])
    other.http.meta("registerInstance", **instance())
    assert other.http.match([1]) == []
