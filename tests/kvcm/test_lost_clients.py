"""Clients that go away, stores that are slow or fail: the state and the store stay alike."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import redis
from google.protobuf import json_format

from hisparse.errors import ConfigError
from hisparse.kvcm.blocks import delete_due, expire_sessions
from hisparse.kvcm.dispatch import Dispatcher
from hisparse.kvcm.election import Node
from hisparse.kvcm.records import restore
from hisparse.kvcm.startup import default_startup
from hisparse.kvcm.state import Group, State
from hisparse.kvcm.storages import Storage
from hisparse.kvcm.store import Changes, Store, open_store
from tests.kvcm.manager import METHODS, Manager, instance, wait_until


class _Store(Store):
    """Takes its time, and fails if told so."""

    delay = 0.0
    fails = False

    def __init__(self) -> None:
        self.records: dict[int, bytes] = {}

    def load(self) -> Any:
        return iter(self.records.items())

    def write(self, changes: Changes) -> None:
        time.sleep(self.delay)
        for number, value in changes.items():  # Failed writes may have been made.
            self.records.pop(number, None)
            if value is not None:
                self.records[number] = value
        if self.fails:
            raise ValueError("no answer")


class _Manager:
    """A manager in this process."""

    def __init__(self, folder: Path) -> None:
        self.store = _Store()
        self.node = Node(self.store, default_startup(folder, 1 << 20))
        self.node.lead(restore(self.store))
        storage, config = default_startup(folder, 1 << 20)
        found, group = Storage(1, storage, True), Group(2, config)
        self.state.storages["nfs_01"], self.state.groups["default"] = found, group
        self.state.last_number = 2
        self.store.records |= {1: found.record(), 2: group.record()}
        self._dispatcher = Dispatcher(self.node)

    @property
    def state(self) -> State:
        assert self.node.state is not None
        return self.node.state

    async def call(self, name: str, service: str = "meta", cut: bool = False, **fields: Any) -> Any:
        """The response; None if the client gave up in the middle."""
        method = METHODS[service, name]
        request = json_format.ParseDict(fields, method.request())
        call = self._dispatcher.bind(method)(request)
        if not cut:
            return await call
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call, 0.05)
        await asyncio.wait(self.node.running)
        return None

    def restored(self) -> State:
        state = restore(self.store)
        state.writer.close()
        return state

    def codes(self) -> dict[int, int]:
        """Status by key, which a restart would not change."""
        now, later = ({
            x.key: x.status
            for y in state.instances.values()
            for z in y.blocks.values()
            for x in z.values()
        } for state in (self.state, self.restored()))  # fmt: skip
        assert now == later
        return now


def _run(folder: Path, test: Callable[[_Manager], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        manager = _Manager(folder)
        await test(manager)
        manager.state.writer.close()

    asyncio.run(run())


def test_what_a_client_began_goes_on_without_it(tmp_path: Path) -> None:
    async def test(manager: _Manager) -> None:
        manager.store.delay = 0.2
        await manager.call("registerInstance", cut=True, **instance())
        await manager.call("registerInstance", **instance())
        assert len(manager.restored().instances) == len(manager.state.instances) == 1
        assert sum(x[:1] == b"I" for x in manager.store.records.values()) == 1
        keys = {"instance_id": "i", "block_keys": [1, 2], "write_timeout_seconds": 30}
        await manager.call("startWriteCache", cut=True, **keys)
        (session,) = manager.state.sessions
        done = {"instance_id": "i", "write_session_id": session, "success_blocks": {"offset": 1}}
        await manager.call("finishWriteCache", cut=True, **done)
        await delete_due(manager.state)
        assert manager.codes() == {1: 3}
        await manager.call("removeCache", cut=True, instance_id="i", block_keys=[1])
        assert manager.codes() == {1: 4}
        manager.state.groups["default"].config.cache_config.reclaim_strategy.ClearField(
            "delay_before_delete_ms"
        )
        await manager.call("startWriteCache", **keys | {"block_keys": [5]})
        await manager.call("removeInstance", "admin", cut=True, instance_id="i")
        await asyncio.sleep(1.1)
        await delete_due(manager.state)
        assert manager.codes() == {} and not manager.state.sessions
        assert sorted(manager.store.records) == [1, 2]

    _run(tmp_path, test)


def test_a_store_that_failed_may_have_the_change(tmp_path: Path) -> None:
    async def test(manager: _Manager) -> None:
        await manager.call("registerInstance", **instance())
        manager.store.fails = True
        keys = {"instance_id": "i", "block_keys": [1, 2], "write_timeout_seconds": 30}
        failed = await manager.call("startWriteCache", **keys)
        assert failed.header.status.message.endswith("the store failed: ValueError: no answer")
        with pytest.raises(OSError, match="no answer"):
            await expire_sessions(manager.state)
        manager.store.fails = False
        assert not (await manager.call("startWriteCache", **keys)).locations
        await expire_sessions(manager.state)
        await delete_due(manager.state)
        assert manager.codes() == {}
        begun = await manager.call("startWriteCache", **keys)
        assert len(begun.locations) == 2
        done = {"instance_id": "i", "write_session_id": begun.write_session_id,
                "success_blocks": {"offset": 2}}  # fmt: skip
        manager.store.fails = True
        assert (await manager.call("finishWriteCache", **done)).header.status.code != 1
        manager.store.fails = False
        assert (await manager.call("finishWriteCache", **done)).header.status.code == 1
        assert manager.codes() == {1: 3, 2: 3}

    _run(tmp_path, test)


def test_a_record_that_could_not_be_deleted_counts_no_more(tmp_path: Path) -> None:
    async def test(manager: _Manager) -> None:
        keys = {"instance_id": "i", "block_keys": [1], "write_timeout_seconds": 30}
        done = {"instance_id": "i", "success_blocks": {"offset": 1}}

        async def write() -> None:
            begun = await manager.call("startWriteCache", **keys)
            answer = await manager.call(
                "finishWriteCache", **done, write_session_id=begun.write_session_id
            )
            assert answer.header.status.code == 1

        await manager.call("registerInstance", **instance())
        await write()
        await manager.call("removeCache", instance_id="i", block_keys=[1])
        before = dict(manager.store.records)
        await asyncio.sleep(1.1)
        await delete_due(manager.state)
        manager.store.records |= before  # As if that write had failed.
        await write()
        number = sum(value[:1] == b"B" for value in manager.store.records.values())
        assert number == 2
        assert manager.codes() == {1: 3}
        group, again = (x.groups["default"] for x in (manager.state, manager.restored()))
        assert again.used == group.used
        assert sum(value[:1] == b"B" for value in manager.store.records.values()) == 1

    _run(tmp_path, test)


def test_no_write_begins_while_a_storage_moves(tmp_path: Path) -> None:
    """Its location would have the old root, and after a restart the new one."""

    async def test(manager: _Manager) -> None:
        await manager.call("registerInstance", **instance())
        keys = {"instance_id": "i", "block_keys": [1], "write_timeout_seconds": 30}
        await manager.call("startWriteCache", **keys)
        manager.store.delay = 0.05
        moved = {"global_unique_name": "nfs_01", "nfs": {"root_path": f"{tmp_path}/moved/"}}
        moving = asyncio.create_task(
            manager.call("updateStorage", "admin", storage=moved, force_update=True)
        )
        await asyncio.sleep(0.01)
        while not moving.done():
            begun = await manager.call("startWriteCache", **keys | {"block_keys": [2]})
            assert all("/moved/" in x.location_specs[0].uri for x in begun.locations)
            await asyncio.sleep(0.01)
        assert (await moving).header.status.code == 1
        assert set(manager.codes()) <= {2}

    _run(tmp_path, test)


def test_a_store_that_fails_while_it_is_read(tmp_path: Path) -> None:
    """The manager tries again, and nothing of the first try goes on."""

    class Failing(_Store):
        opened = 0

        def acquire(self, name: str) -> str:
            self.opened += 1
            return name

        def load(self) -> Any:
            if self.opened < 4:
                raise TimeoutError("no answer") if self.opened % 2 else redis.TimeoutError("none")
            return super().load()

    async def run() -> None:
        store = Failing()
        node = Node(store, default_startup(tmp_path, 1 << 20))
        node.name = "a"
        with pytest.raises(OSError, match="no answer"):
            await node.campaign()
        with pytest.raises(ConfigError, match="store: got TimeoutError: none"):
            await node.campaign()
        running = asyncio.create_task(node.run())
        while node.lease_left <= 0:
            await asyncio.sleep(0.01)
        assert store.opened == 4
        names = [x.name for x in threading.enumerate()]
        assert names.count("kvcm-store") == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await node.step_down()

    asyncio.run(run())


def test_instances_have_limits(managers: Callable[..., Manager]) -> None:
    client = managers().http
    many = [{"name": f"s{x}", "size": 1} for x in range(1025)]
    for change in (
        {"location_spec_infos": many},
        {"location_spec_groups": [{"name": f"g{x}", "spec_names": ["tp0"]} for x in range(1025)]},
    ):
        status = client.respond("meta", "registerInstance", instance() | change)["header"]["status"]
        assert status["message"].endswith("got 1025, expected at most 1024")
    client.register(location_spec_infos=many[:1024])
    asked = {"instance_id": "i", "query_type": "QT_BATCH_GET"}
    assert len(client.meta("getCacheLocation", **asked, block_keys=[1] * 2)["locations"]) == 2
    answer = client.respond("meta", "getCacheLocation", asked | {"block_keys": [1] * 1025})
    message = answer["header"]["status"]["message"]
    assert message == "keys: got 1025, expected at most 1024 with the instance's specs"


def test_half_a_body_does_not_keep_a_manager_from_ending(managers: Callable[..., Manager]) -> None:
    manager = managers()
    with socket.create_connection(("127.0.0.1", manager.ports["http"])) as half:
        half.sendall(b"POST /api/getCacheLocation HTTP/1.1\r\nHost: x\r\n")
        half.sendall(b"Content-Length: 9\r\n\r\n{")
        time.sleep(0.2)
        begin = time.monotonic()
        manager.stop()
        assert time.monotonic() - begin < 10


def test_one_manager_writes_to_a_redis(managers: Callable[..., Manager], redis_url: str) -> None:
    manager = managers(store=redis_url)
    manager.http.register()
    leader = manager.http.admin("getManagerClusterInfo")["self_node_id"]
    store = open_store(redis_url)
    assert store.acquire("other") == leader
    manager.kill()
    assert store.acquire("other") == "other"  # The owner is dead.
    store.close()
    manager.start()
    assert manager.http.put([1])
    with pytest.raises(OSError, match="has this store now"):
        store.write({1: None})
    assert manager.http.match([1])


def test_who_comes_and_goes_takes_the_store_too(
    managers: Callable[..., Manager], redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manager that was not heard of for too long answers no more from what it remembers."""
    manager = managers(store=redis_url)
    manager.http.register()
    assert manager.http.put([1])
    redis.Redis.from_url(redis_url).delete("hisparse:kvcm:owner")  # As if its lease were over.
    other = open_store(redis_url)
    other.acquire("other")
    asked = {"instance_id": "i", "query_type": "QT_PREFIX_MATCH", "block_keys": [1]}

    def code() -> str:
        return str(
            manager.http.respond("meta", "getCacheLocation", asked)["header"]["status"]["code"]
        )

    wait_until(lambda: code() == "SERVER_NOT_LEADER")
    assert not manager.http.admin("checkHealth")["is_leader"]
    other.close()
    wait_until(lambda: code() == "OK")
