"""Quotas under many writers, and which blocks go when there is no room."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf import json_format

from hisparse.kvcm import blocks, cache
from hisparse.kvcm.reclaim import reclaim
from hisparse.kvcm.records import restore
from hisparse.kvcm.registry import Registry
from hisparse.kvcm.startup import default_startup
from hisparse.kvcm.state import SERVING, Group, State
from hisparse.kvcm.storages import Storage
from hisparse.kvcm.store import Store, Writer
from hisparse.kvcm.wire import PROTO
from tests.kvcm.manager import (
    Client,
    Manager,
    ManagerError,
    group,
    instance,
    path_of,
    store_bytes,
    uris,
    wait_until,
)
from tests.sizes import sized

Start = Callable[..., Manager]
_SIZE = 64


def _used(client: Client, name: str = "i") -> int:
    return round(client.metric("cache_manager_instance.byte_size", instance_id=name))


def test_no_quota_is_passed_by_many_writers(managers: Start) -> None:
    """Not for a moment: a writer asks all the time."""
    capacity = 1000 * _SIZE
    manager = managers(capacity=capacity)
    manager.grpc.register()
    seen, refused, stop = [0], list[str](), threading.Event()

    def watch() -> None:
        client = Client(manager, "grpc")
        while not stop.is_set():
            seen.append(_used(client))
        client.close()

    def write(seed: int) -> None:
        client, chance = Client(manager, "grpc"), random.Random(seed)
        for _ in range(sized(10, 100)):
            keys = [chance.getrandbits(60) for _ in range(chance.randint(1, 60))]
            try:
                client.put(keys)
            except ManagerError as error:
                refused.append(str(error))
        client.close()

    watcher = threading.Thread(target=watch)
    writers = [threading.Thread(target=write, args=(seed,)) for seed in range(64)]
    for thread in (watcher, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    watcher.join()
    assert all(x.startswith("INTERNAL_ERROR: quota: got") for x in refused)
    assert len(seen) > 20 and capacity / 2 < max(seen) <= capacity
    wait_until(lambda: _used(manager.grpc) <= 0.8 * capacity)


def test_what_is_asked_is_freed_and_no_more(managers: Start) -> None:
    """80 of 100 blocks may stay. Reads count as use; of a prefix the end goes first."""
    manager = managers(capacity=100 * _SIZE)
    client = manager.http
    client.register()
    for key in range(8):
        found = client.put([10 * key + x for x in range(10)])
        for uri in found:
            store_bytes(uri, b"x" * _SIZE)
    assert len(client.match([0, 1, 2])) == 3  # Used again, the others of 0 to 9 are not.
    time.sleep(0.3)
    assert client.states(list(range(80))) == ["SERVING"] * 80
    client.put(list(range(100, 109)))
    wait_until(lambda: _used(client) == 80 * _SIZE)
    time.sleep(0.3)
    gone = [x for x in range(80) if client.states([x]) == ["NOT_FOUND"]]
    assert gone == [3, 4, 5, 6, 7, 8, 9, 18, 19]
    assert client.metric("cache_reclaimer.block_submit_count") == 9
    wait_until(lambda: sum(x.is_file() for x in manager.root.glob("*/*/*")) == 71)


def test_a_full_group_makes_room_for_what_it_refused(managers: Start) -> None:
    """Even where blocks may fill the whole quota."""
    client = managers(capacity=10 * _SIZE, share=1.0).http
    client.register()
    client.put(list(range(10)))
    with pytest.raises(ManagerError, match="quota: got 640 bytes and 192 new ones, expected at m"):
        client.put([20, 21, 22])
    wait_until(lambda: _used(client) == 7 * _SIZE)
    client.put([20, 21, 22])
    with pytest.raises(ManagerError, match="quota"):
        client.put(list(range(30, 41)))  # Can never fit: nothing goes for it.
    time.sleep(0.3)
    assert _used(client) == 10 * _SIZE


@pytest.mark.parametrize("step", [{"reclaim_step_size": 2 * _SIZE}, {"reclaim_step_percentage": 2}])
def test_reclaim_goes_in_steps(step: dict[str, int], tmp_path: Path) -> None:
    """Of two blocks: down to the same level, in the same order."""

    async def run() -> list[int]:
        state = State(Writer(Store()))
        storage, config = default_startup(tmp_path, 100 * _SIZE)
        strategy = config.cache_config.reclaim_strategy
        json_format.ParseDict(step, strategy)
        strategy.trigger_strategy.used_percentage = 0.05
        state.storages["nfs_01"], state.groups["default"] = (
            Storage(1, storage, True),
            Group(2, config),
        )
        found = PROTO.RegisterInstanceRequest()
        await Registry(state).register(json_format.ParseDict(instance(), found))
        keys, left = state.instances["i"], list[int]()
        session, _ = cache.start_write(state, keys, list(range(10)), (), 30)
        await blocks.begin_session(state, session)
        await cache.finish_write(state, keys, session.id, PROTO.BlockMask(offset=10))
        for _ in range(4):
            await reclaim(state)
            (shelf,) = keys.blocks.values()
            left.append(sum(x.status == SERVING for x in shelf.values()))
        state.writer.close()
        return left

    assert asyncio.run(run()) == [8, 6, 5, 5]


@pytest.mark.parametrize("limit", ["type", "used_size", "keys"])
def test_other_limits(managers: Start, limit: str) -> None:
    client = managers().http
    made = group("g")
    if limit == "type":
        quotas = [{"storage_type": "ST_NFS", "capacity": 10 * _SIZE}]
        made["quota"] = {"capacity": 1 << 30, "quota_config": quotas}
    elif limit == "used_size":
        trigger = {"used_size": 8 * _SIZE}
        made["cache_config"]["reclaim_strategy"]["trigger_strategy"] = trigger
    else:
        made["cache_config"]["meta_indexer_config"]["max_key_count"] = 10
    client.admin("createInstanceGroup", instance_group=made)
    client.register(instance_group="g")
    client.put(list(range(10)))
    wait_until(lambda: _used(client) == 8 * _SIZE)
    if limit != "used_size":
        with pytest.raises(ManagerError, match="no candidate with room|max_key_count"):
            client.put([20, 21, 22])
        wait_until(lambda: _used(client) == 7 * _SIZE)
    client.put([20, 21, 22])
    time.sleep(0.3)
    assert _used(client) <= 10 * _SIZE
    assert client.states([20, 21, 22]) == ["SERVING"] * 3


@pytest.mark.parametrize("policy", ["POLICY_LRU", "POLICY_LFU"])
def test_policies(managers: Start, policy: str) -> None:
    """Block 0 is read often, and blocks 1 to 9 once, later."""
    client = managers().http
    made = group("g")
    strategy = made["cache_config"]["reclaim_strategy"]
    strategy |= {"reclaim_policy": policy, "trigger_strategy": {"used_size": 99 * _SIZE}}
    client.admin("createInstanceGroup", instance_group=made)
    client.register(instance_group="g")
    client.put(list(range(8)))
    for _ in range(3):
        client.match([0])
    client.match(list(range(1, 8)))
    client.put([8, 9])
    made["version"] = 2
    strategy["trigger_strategy"] = {"used_size": 8 * _SIZE}
    client.admin("updateInstanceGroup", instance_group=made, current_version=1)
    wait_until(lambda: _used(client) == 8 * _SIZE)
    left = [x for x in range(10) if client.states([x]) == ["SERVING"]]
    expected = {"POLICY_LRU": [1, 2, 3, 4, 5, 6, 8, 9], "POLICY_LFU": list(range(8))}
    assert left == expected[policy]


def test_blocks_have_a_time_to_live(managers: Start) -> None:
    """It counts from the last use."""
    client = managers().http
    made = group("g")
    strategy = made["cache_config"]["reclaim_strategy"]
    strategy |= {"reclaim_policy": "POLICY_TTL", "trigger_period_seconds": 2}
    client.admin("createInstanceGroup", instance_group=made)
    client.register("other")
    client.register(instance_group="g")
    client.put([1], "other")
    client.put([1, 2, 3])
    begin = time.monotonic()
    while time.monotonic() < begin + 1.5:
        client.match([1])
        time.sleep(0.05)
    assert client.states([1, 2, 3]) == ["SERVING"] * 3
    wait_until(lambda: client.states([2, 3]) == ["NOT_FOUND"] * 2)
    assert client.states([1], "other") == ["SERVING"]
    wait_until(lambda: client.states([1]) == ["NOT_FOUND"])
    assert time.monotonic() - begin > 3


@pytest.mark.parametrize("policy", ["POLICY_LRU", "POLICY_LFU"])
def test_reads_are_known_after_a_restart(managers: Start, tmp_path: Path, policy: str) -> None:
    manager = managers(store=str(tmp_path / "db"))
    client = manager.http
    made = group("g")
    made["cache_config"]["reclaim_strategy"]["reclaim_policy"] = policy
    client.admin("createInstanceGroup", instance_group=made)
    client.register(instance_group="g")
    client.put(list(range(10)))
    client.register("unread")
    client.put([0], "unread")
    client.match([9])
    for _ in range(2):
        client.match([5, 6])
    client.meta("removeCache", instance_id="i", block_keys=[6])
    for _ in range(2):  # What was read before the first one is still known after the second.
        manager.stop()
        manager.start()
        manager.http.match([3])
    made["version"] = 2
    made["cache_config"]["reclaim_strategy"]["trigger_strategy"] = {"used_size": 3 * _SIZE}
    client = manager.http
    client.admin("updateInstanceGroup", instance_group=made, current_version=1)
    wait_until(lambda: _used(client) == 3 * _SIZE)
    assert [x for x in range(10) if client.states([x]) == ["SERVING"]] == [3, 5, 9]


def test_nothing_is_deleted_while_it_may_be_read(managers: Start) -> None:
    client = managers(delay_ms=700, blocks_per_file=2).http
    client.register()
    found = client.put([1, 2, 3])
    for uri in found:
        store_bytes(uri, b"x" * _SIZE)
    client.meta("removeCache", instance_id="i", block_keys=[1, 3])
    begin = time.monotonic()
    assert client.match([2, 1]) == [found[1]]
    assert client.states([1, 2, 3]) == ["DELETING", "SERVING", "DELETING"]
    assert _used(client) == 3 * _SIZE
    assert path_of(found[2]).exists()
    wait_until(lambda: not path_of(found[2]).exists())
    assert time.monotonic() - begin > 0.6
    # Block 2 is in the first file, too.
    assert path_of(found[0]) == path_of(found[1]) and path_of(found[0]).exists()
    client.meta("removeCache", instance_id="i", block_keys=[2])
    wait_until(lambda: not path_of(found[0]).exists())


def test_writes_expire_on_time(managers: Start) -> None:
    """Also with many of them: upstream ends one each 5 s."""
    client = managers().grpc
    client.register()
    (uri,) = uris(client.write([0], seconds=1))
    store_bytes(uri, b"x" * _SIZE)
    for key in range(1, 600):
        client.write([key], seconds=1 + (key % 2) * 100)
    begin = time.monotonic()
    wait_until(lambda: client.states([598]) == ["NOT_FOUND"])
    assert time.monotonic() - begin < 10
    states = client.states(list(range(600)))
    assert states == ["NOT_FOUND", "WRITING"] * 300
    assert client.metric("cache_manager.write_location_expire_size") == 300
    wait_until(lambda: not path_of(uri).exists())


def test_what_a_slow_writer_leaves_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes a file that the manager has deleted, since its time is over."""
    monkeypatch.setattr(blocks, "_LATE_S", 0.2)

    async def run() -> None:
        state = restore(Store())
        storage, config = default_startup(tmp_path, 1 << 20)
        state.storages["nfs_01"] = Storage(1, storage, True)
        state.groups["default"] = Group(2, config)
        request = json_format.ParseDict(instance(), PROTO.RegisterInstanceRequest())
        engine = await Registry(state).register(request)
        session, _ = cache.start_write(state, engine, [1], [], 0)
        await blocks.begin_session(state, session)
        await blocks.expire_sessions(state)
        await blocks.delete_due(state)
        assert engine.num_keys == 0
        (path,) = map(Path, session.blocks[0].paths)
        path.parent.mkdir(parents=True)
        path.touch()
        await blocks.delete_due(state)
        assert path.exists()
        await asyncio.sleep(0.25)
        await blocks.delete_due(state)
        assert not path.exists()
        state.writer.close()

    asyncio.run(run())
