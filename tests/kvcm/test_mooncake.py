"""Blocks in a real Mooncake: pages, removals, writers that die, a master that dies."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from hisparse.kvcm.client import ManagerError
from hisparse.kvcm.mooncake import Mooncake, MooncakeProcess
from hisparse.storage.managed import ManagedStore, block_key
from tests.kvcm.manager import Forker, Manager, group, wait_until
from tests.kvcm.test_managed_store import NAMESPACE, SIZE, key, page
from tests.server import mooncake_master
from tests.sizes import sized


def needs_mooncake(test: Any) -> Any:
    """Mark a test of PART=sweeps, which makes the tools."""
    reason = "needs make mooncake-tools"
    return pytest.mark.sweeps(
        pytest.mark.skipif(not mooncake_master.is_installed(), reason=reason)(test)
    )


LENT = 64 << 20
_NUM_PAGES = 100


class Engine:
    """A store in a process of its own: Mooncake's library takes signals, and loads Debian's.

    Args:
        address: of the manager.
        spec: of the Mooncake.
    """

    def __init__(self, address: str, spec: dict[str, str], lent: int = LENT) -> None:
        self._pool = ProcessPoolExecutor(
            1, get_context("spawn"), initializer=_open, initargs=(address, spec, lent)
        )
        self.pid = self._pool.submit(os.getpid).result(60)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *numbers: self._pool.submit(_call, name, numbers).result(60)

    def start(self, name: str, *numbers: int) -> Future[Any]:
        """Call a function, and do not wait."""
        return self._pool.submit(_call, name, numbers)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._pool.shutdown()


_opened: dict[str, Any] = {}


def _open(address: str, spec: dict[str, str], lent: int) -> None:
    _opened.update(store=ManagedStore(address, "mooncake", 10.0, lent), spec=spec)


def _call(name: str, numbers: tuple[Any, ...]) -> Any:
    if name == "values":  # Which URIs the Mooncake has.
        if "client" not in _opened:
            _opened["client"] = Mooncake(_opened["spec"])
        return [_has(_opened["client"], uri) for uri in numbers]
    if name == "has_manager":
        try:
            return _call("find", numbers) >= 0
        except ManagerError:  # Which cannot be pickled.
            return False
    if name == "write":
        return _write_on(_opened["store"], *numbers)
    store, keys = _opened["store"], list(map(key, numbers))
    if name == "put":
        return store.put(NAMESPACE, keys, list(map(page, numbers)))
    if name == "find":
        store._seen_until = 0.0  # As after a second.
        return store.find(NAMESPACE, keys)
    if name == "uris":
        return store._places(NAMESPACE, keys)
    buffers = [bytearray(SIZE) for _ in numbers]
    found = store.get(NAMESPACE, keys, buffers)
    for number, ok, buffer in zip(numbers, found, buffers, strict=True):
        assert not ok or buffer == page(number), number
    return found


def _write_on(store: ManagedStore, seed: int) -> set[int]:
    """Write random pages until the manager is gone; those that it acknowledged."""
    chance, acknowledged = random.Random(seed), set[int]()
    try:
        while True:
            some = chance.sample(range(_NUM_PAGES), 5)
            new = [x for x in some if store._places(NAMESPACE, [key(x)]) == [""]]
            if new:
                _call("put", tuple(new))
            acknowledged |= {x for x in new if store._seen.get((NAMESPACE.key, key(x)))}
    except ManagerError:
        return acknowledged


def _has(client: Mooncake, uri: str) -> bool:
    try:
        return client.get(uri.partition("key=")[2].partition("&")[0], bytearray(SIZE + 16))
    except FileNotFoundError:
        return False


@pytest.fixture
def master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[mooncake_master.Master]:
    monkeypatch.setenv("LD_LIBRARY_PATH", mooncake_master.LIBRARY_PATH)
    monkeypatch.syspath_prepend(str(mooncake_master.TOOLS))
    with mooncake_master.running(tmp_path) as master:
        yield master


@pytest.fixture
def manager(master: mooncake_master.Master, tmp_path: Path) -> Iterator[Manager]:
    """A manager of a group ``mooncake``, with room for eight pages below its level."""
    forker = Forker()
    manager = Manager(forker, tmp_path, store=str(tmp_path / "db"), apart=False)
    spec = {
        "metadata_connstring": master.options["metadata_server"],
        "master_service_entry": master.options["master_server_address"],
    }
    client = manager.http
    client.admin("addStorage", storage={"global_unique_name": "mc", "mooncake": spec})
    made = group("mooncake", storage_candidates=["mc"], quota={"capacity": 10 * (SIZE + 16)})
    client.admin("createInstanceGroup", instance_group=made)
    yield manager
    if Path(f"/proc/{manager.pid}").exists():
        manager.kill()
    forker.close()


@pytest.fixture
def engines(manager: Manager, master: mooncake_master.Master) -> Iterator[Callable[..., Engine]]:
    started = list[Engine]()

    def start(**options: Any) -> Engine:
        spec = {
            "metadata_connstring": master.options["metadata_server"], "protocol": "tcp",
            "rdma_device": "", "master_server_entry": master.options["master_server_address"],
        }  # fmt: skip
        started.append(Engine(f"127.0.0.1:{manager.ports['rpc']}", spec, **options))
        return started[-1]

    yield start
    for engine in started:
        if Path(f"/proc/{engine.pid}").exists():
            engine.kill()


@needs_mooncake
def test_pages_lie_in_a_mooncake(manager: Manager, engines: Callable[..., Engine]) -> None:
    client = manager.http
    writer, reader = engines(), engines(lent=0)
    assert writer.put(1, 2, 3)
    assert reader.find(1, 2, 3, 4) == 3 and reader.get(3, 4, 1) == [True, None, True]
    uris = reader.uris(1, 2)
    for number, uri in zip((1, 2), uris, strict=True):
        name = f"{block_key(key(number)) & (1 << 64) - 1:x}"
        start = f"mooncake://mc/?key={NAMESPACE.key}/tp_1/{name}_"
        assert uri.startswith(start) and uri.endswith(f"&size={SIZE + 16}")
    assert reader.values(*uris) == [True, True]
    # What is removed is gone there, and can be written again.
    number = block_key(key(1))
    client.meta("removeCache", instance_id=NAMESPACE.key, block_keys=[number])
    wait_until(lambda: client.states([number], NAMESPACE.key) == ["NOT_FOUND"])
    assert reader.values(*uris) == [False, True]
    assert writer.put(1) and writer.uris(1) != uris[:1] and reader.get(1) == [None]
    assert reader.get(1) == [True]
    # Reclaim deletes values, the oldest first.
    kept = [uris[1], *reader.uris(3)]
    assert writer.put(4, 5, 6, 7, 8, 9, 10)
    old = [block_key(key(x)) for x in (2, 3)]
    wait_until(lambda: client.states(old, NAMESPACE.key) == ["NOT_FOUND"] * 2)
    assert reader.values(*kept) == [False, False]
    assert reader.find(4, 5, 6, 7, 8, 9, 10) == 7


@needs_mooncake
def test_a_writer_that_dies(manager: Manager, engines: Callable[..., Engine]) -> None:
    """What it began is deleted at the deadline; of what it held no page is found."""
    client = manager.http
    writer, other = engines(), engines()
    assert writer.put(1)
    begun = client.write([block_key(key(2))], NAMESPACE.key, seconds=1)
    (location,) = begun["locations"]
    (uri,) = (x["uri"] for x in location["location_specs"])
    assert uri.startswith("mooncake://mc/")
    writer.kill()
    wait_until(lambda: client.states([block_key(key(2))], NAMESPACE.key) == ["NOT_FOUND"])
    # It may be sent to the memory of the dead one first.
    wait_until(lambda: other.put(2) and other.get(2) == [True])
    assert other.get(1) == [None]


@needs_mooncake
def test_killed_in_the_middle_of_writes(
    manager: Manager, engines: Callable[..., Engine], tmp_path: Path
) -> None:
    """What is found is whole, and nothing that the manager acknowledged is lost."""
    made = group("mooncake", storage_candidates=["mc"], version=2)
    manager.http.admin("updateInstanceGroup", instance_group=made, current_version=1)
    writers, acknowledged, most = [engines(), engines()], set[int](), 0
    for run in range(sized(3, 30)):
        begun = [x.start("write", 2 * run + i) for i, x in enumerate(writers)]
        # The first time they connect.
        time.sleep(random.Random(run).uniform(0.05, 0.4) if run else 2.0)
        manager.kill()
        acknowledged = acknowledged.union(*(x.result(60) for x in begun))
        manager.start()
        wait_until(lambda: all(x.has_manager(0) for x in writers))  # And ask for places anew.
        found = [x for x in range(_NUM_PAGES) if writers[0].find(x)]
        assert acknowledged <= set(found), (run, acknowledged - set(found))
        assert all(writers[1].get(*found)), run
        most = max(most, len(found))
        if not (gone := found[::2]):
            continue
        numbers = [block_key(key(x)) for x in gone]
        client = manager.http
        client.meta("removeCache", instance_id=NAMESPACE.key, block_keys=numbers)
        wait_until(lambda client=client, numbers=numbers: set(
            client.states(numbers, NAMESPACE.key)) <= {"NOT_FOUND"})  # fmt: skip
        acknowledged = set(found) - set(gone)
    assert most > 0, "nothing was written"


@needs_mooncake
def test_a_master_that_dies(
    manager: Manager, master: mooncake_master.Master, engines: Callable[..., Engine]
) -> None:
    client = manager.http
    writer = engines()
    assert writer.put(1)
    os.kill(master.process.pid, signal.SIGSTOP)  # A call hangs.
    try:
        asked = time.monotonic()
        assert client.admin("checkHealth")["is_leader"]
        assert time.monotonic() - asked < 1
    finally:
        os.kill(master.process.pid, signal.SIGCONT)
    wait_until(lambda: client.match([block_key(key(1))], NAMESPACE.key) != [])
    master.process.kill()
    wait_until(lambda: client.metric("data_storage.is_available", storage="mc") == 0)
    assert client.match([block_key(key(1))], NAMESPACE.key) == []
    assert writer.find(1) == 0


def test_a_client_that_cannot_be(tmp_path: Path) -> None:
    """One line each, and the next call tries again."""
    spec = {"metadata_connstring": "", "protocol": "", "rdma_device": ""}
    process = MooncakeProcess(spec | {"master_server_entry": "nowhere"})
    for _ in range(2):
        with pytest.raises(OSError, match=r"^mooncake: got [^\n]*, expected [^\n]*$"):
            process.check()
    assert process._process is not None
    process._process.kill()
    with pytest.raises(OSError, match="its client has ended"):
        process.check()
    with pytest.raises(OSError, match=r"^mooncake: got "):
        process.remove(["a"])
    process.close()
    process.close()
