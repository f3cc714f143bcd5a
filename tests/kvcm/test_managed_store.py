"""Pages in files that a manager assigns: as a store of pages, and while the manager is killed."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hisparse.errors import HiSparseError
from hisparse.kvcm.client import ManagerError
from hisparse.storage import Namespace
from hisparse.storage import managed as module
from hisparse.storage.managed import ManagedStore
from tests.kvcm.manager import Manager, wait_until
from tests.sizes import sized

Start = Callable[..., Manager]
SIZE = 1000
NAMESPACE = Namespace(
    model="m", kv_dtype="bfloat16", page_size=16, rank=1, num_ranks=2, page_bytes=SIZE
)


def key(number: int) -> str:
    return f"{number:064x}"


def page(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def opened(*managers: Manager, timeout_s: float = 5.0) -> ManagedStore:
    for each in managers:
        each.root.mkdir(mode=0o700, exist_ok=True)
    addresses = ",".join(f"127.0.0.1:{each.ports['rpc']}" for each in managers)
    return ManagedStore(addresses, "default", timeout_s)


def put(store: ManagedStore, *numbers: int, namespace: Namespace = NAMESPACE) -> bool:
    return store.put(namespace, list(map(key, numbers)), list(map(page, numbers)))


def find(store: ManagedStore, *numbers: int, namespace: Namespace = NAMESPACE) -> int:
    store._seen_until = 0.0  # As after a second.
    return store.find(namespace, list(map(key, numbers)))


def get(store: ManagedStore, *numbers: int) -> list[bool | None]:
    buffers = [bytearray(SIZE) for _ in numbers]
    found = store.get(NAMESPACE, list(map(key, numbers)), buffers)
    for number, ok, buffer in zip(numbers, found, buffers, strict=True):
        assert not ok or buffer == page(number), number
    return found


def files(manager: Manager) -> list[Path]:
    return [path for path in manager.root.glob("*/*/*") if path.is_file()]


@pytest.fixture(params=[1, 3])
def manager(request: pytest.FixtureRequest, managers: Start) -> Manager:
    return managers(blocks_per_file=request.param, delay_ms=0)


@pytest.fixture
def store(manager: Manager) -> Iterator[ManagedStore]:
    with closing(opened(manager)) as store:
        yield store


def test_another_store_reads_what_one_wrote(manager: Manager, store: ManagedStore) -> None:
    assert find(store, 1, 2) == 0
    assert put(store, 1, 2, 3, 5)
    assert put(store, 3, 4), "one of them is there already"
    with closing(opened(manager)) as other:
        assert find(other, 1, 2, 3, 4, 6) == 4
        assert get(other, 4, 3, 6, 5, 1) == [True, True, None, True, True]
        assert find(other, 1, namespace=replace(NAMESPACE, rank=0)) == 0
        assert find(other, 1, namespace=replace(NAMESPACE, model="n")) == 0
    info = manager.http.meta("getInstanceInfo", instance_id=NAMESPACE.key)["instance_info"]
    assert info["location_spec_infos"] == [{"name": "tp_1", "size": str(SIZE + 16)}]
    assert (info["block_size"], info["model_deployment"]["model_name"]) == (16, "m")
    assert {path.stat().st_mode & 0o777 for path in files(manager)} == {0o600}
    assert (manager.root / NAMESPACE.key / "tp_1").stat().st_mode & 0o777 == 0o700


def test_keys_are_those_of_the_connector_for_sglang() -> None:
    """int.from_bytes(sha256(page hash).digest()[:8], "big", signed=True), computed elsewhere."""
    # printf abc | sha256sum: ba7816bf8f01cfea…
    assert module.block_key("abc") == 0xBA7816BF8F01CFEA - (1 << 64)


def test_answers_hold_for_a_second(manager: Manager, store: ManagedStore) -> None:
    with closing(opened(manager)) as other:
        assert find(other, 1) == 0
        put(store, 1)
        assert other.find(NAMESPACE, [key(1)]) == 0, "a waiting request repeats its lookup"
        wait_until(lambda: other.find(NAMESPACE, [key(1)]) == 1)
        assert put(other, 2) and other.find(NAMESPACE, [key(1), key(2)]) == 2


def test_a_damaged_page_and_a_lost_file_are_forgotten(
    manager: Manager, store: ManagedStore
) -> None:
    put(store, 1)
    put(store, 2)
    put(store, 3)
    path = {number: _path(store, number) for number in (1, 2, 3)}
    with path[1].open("r+b") as file:
        file.seek(77)
        byte = file.read(1)[0]
        file.seek(77)
        file.write(bytes([byte ^ 4]))
    path[2].unlink()
    os.truncate(path[3], SIZE)
    assert get(store, 1, 2, 3) == [False, None, False]
    wait_until(lambda: manager.http.states(list(map(_block, (1, 2, 3))), NAMESPACE.key)
               == ["NOT_FOUND"] * 3)  # fmt: skip
    assert find(store, 1) == 0
    assert put(store, 1, 2, 3) and get(store, 1, 2, 3) == [True] * 3


def _block(number: int) -> int:
    return module.block_key(key(number))


def _path(store: ManagedStore, number: int) -> Path:
    (uri,) = store._places(NAMESPACE, [key(number)])
    place = store._place(NAMESPACE, uri)
    return place.folder / place.file


def test_a_page_that_moved_is_not_forgotten(manager: Manager, store: ManagedStore) -> None:
    put(store, 1)
    with closing(opened(manager)) as other:
        find(other, 1)
        other.remove(NAMESPACE, [key(1)])
        wait_until(lambda: manager.http.states([_block(1)], NAMESPACE.key) == ["NOT_FOUND"])
        put(other, 1)
    assert get(store, 1) == [None]
    assert get(store, 1) == [True]


def test_removed_pages_can_be_written_again(manager: Manager, store: ManagedStore) -> None:
    put(store, 1, 2)
    assert store.remove(NAMESPACE, [key(1)]) == 1 and store.remove(NAMESPACE, unused_s=1.0) == 0
    wait_until(lambda: manager.http.states([_block(1)], NAMESPACE.key) == ["NOT_FOUND"])
    assert find(store, 1) == 0 and find(store, 2) == 1
    assert put(store, 1) and get(store, 1, 2) == [True, True]


def test_a_disk_that_refuses(
    manager: Manager, store: ManagedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written before serves, the rest does not."""
    write, calls = module.write_parts, list[int]()

    def full(fd: int, parts: Any) -> None:
        calls.append(fd)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        write(fd, parts)

    monkeypatch.setattr(module, "write_parts", full)
    with pytest.raises(HiSparseError, match="No space left on device"):
        put(store, 1, 2, 3, 4)
    monkeypatch.undo()
    assert find(store, 1, 2, 3) == 2 and get(store, 1, 2) == [True, True]
    wait_until(lambda: manager.http.states([_block(3)], NAMESPACE.key) == ["NOT_FOUND"])
    assert put(store, 3, 4) and get(store, 3, 4) == [True, True]


def test_a_full_group_is_read_on(managers: Start) -> None:
    with closing(opened(managers(capacity=2 * (SIZE + 16), share=1.0))) as store:
        assert put(store, 1, 2)
        assert not put(store, 3)
        assert find(store, 1, 2, 3) == 2 and get(store, 1, 2, 3) == [True, True, None]


def test_a_folder_that_is_not_mounted(managers: Start) -> None:
    manager = managers(probes=False)  # It is mounted where the manager is.
    with closing(opened(manager)) as store:
        manager.root.rmdir()
        with pytest.raises(HiSparseError, match="expected it to be mounted here"):
            put(store, 1)
        assert not manager.root.exists()
        manager.root.mkdir(mode=0o700)
        put(store, 2)
        manager.root.rename(manager.root.with_name("elsewhere"))
    with closing(opened(manager)) as other:  # Its folder is another, an empty one.
        assert get(other, 2) == [None]
        assert find(other, 2) == 1, "the page is not forgotten, since others may have it"
        manager.root.chmod(0o777)
        with pytest.raises(HiSparseError, match="can be written to by others"):
            put(other, 3)


@pytest.mark.parametrize(
    "uri",
    [
        "", "file://nfs_01", "mooncake://nfs_01/?key={own}/1&size=1016", "file://other/x?size=1016",
        "file://nfs_01{root}/../x?size=1016", "file://nfs_01/etc/passwd?size=1016",
        "file://nfs_01{root}/{own}/1?size=1017", "file://nfs_01{root}/{own}/1?size=-1",
        "file://nfs_01{root}/{own}/1?blkid=-1&size=1016", "file://nfs_01{root}//x?size=1016",
        "file://nfs_01{root}?size=1016", "file://nfs_01{root}/{own}/1\0?size=1016&a=b",
        "file://nfs_01{root}/authorized_keys?size=1016", "file://nfs_01{root}/i/tp_1/1?size=1016",
        "file://nfs_01{root}/{own}/x/1?size=1016", "file://nfs_01{root}/{own}/key.pem?size=1016",
        "file://nfs_01{root}/{own}/..?size=1016", "mooncake://mc/?key=i/tp_1/1&size=1016",
        "mooncake://mc{root}/{own}/1?size=1016", "mooncake://mc/?key=/{own}/1&size=1016",
        "file://mc/?key={own}/1&size=1016", "mooncake://mc/?size=1016",
    ],
)  # fmt: skip
def test_places_that_no_storage_has_are_refused(shared: Manager, uri: str) -> None:
    """A manager cannot name other files of the engines' user, or other keys."""
    with closing(opened(shared)) as store:
        find(store, 1)
        store._storages[NAMESPACE.key]["mc"] = {"master_server_entry": "127.0.0.1:1"}
        own = f"{NAMESPACE.key}/tp_1"
        for right in ("file://nfs_01{root}/{own}/1?blkid=2&size=1016",
                      "mooncake://mc/?key={own}/1_2&size=1016"):  # fmt: skip
            assert store._place(NAMESPACE, right.format(root=shared.root, own=own))
        with pytest.raises(ManagerError, match=r"^manager: place: got .*, expected [^\n]*$"):
            store._place(NAMESPACE, uri.format(root=shared.root, own=own))


def test_a_storage_that_the_group_got_later(managers: Start, tmp_path: Path) -> None:
    manager = managers()
    with closing(opened(manager)) as store:
        put(store, 1)
        root = tmp_path / "second"
        root.mkdir(mode=0o700)
        manager.http.admin(
            "addStorage",
            storage={"global_unique_name": "nfs_02", "nfs": {"root_path": f"{root}/"}},
        )
        group = manager.http.admin("getInstanceGroup", name="default")["instance_group"]
        version = int(group["version"])
        group |= {"storage_candidates": ["nfs_01", "nfs_02"], "version": version + 1}
        manager.http.admin("updateInstanceGroup", instance_group=group, current_version=version)
        manager.http.admin("disableStorage", storage_unique_name="nfs_01")
        assert put(store, 2) and get(store, 2) == [True]
        assert any(path.is_file() for path in root.rglob("*"))


def test_a_manager_that_forgot_everything(managers: Start) -> None:
    manager = managers(apart=False)
    with closing(opened(manager)) as store:
        put(store, 1)
        manager.kill()
        with pytest.raises(ManagerError, match=r"^manager .*: got UNAVAILABLE .*, expected OK$"):
            find(store, 1)
        manager.start()
        wait_until(lambda: _answers(store))
        assert find(store, 1) == 0
        assert put(store, 1) and get(store, 1) == [True]


def _answers(store: ManagedStore) -> bool:
    try:
        find(store, 1)
    except ManagerError:
        return False
    return True


def test_the_next_manager_is_asked(managers: Start) -> None:
    first, second = managers(), managers()
    with closing(opened(first, second)) as store:
        put(store, 1)
        first.kill()
        assert find(store, 1) == 0 and put(store, 2)
        second.kill()
        with pytest.raises(ManagerError, match="UNAVAILABLE"):
            find(store, 2)


def test_the_manager_after_one_that_hangs_is_asked(managers: Start) -> None:
    first, second = managers(), managers()
    with closing(opened(first, second, timeout_s=1.0)) as store:
        put(store, 1)
        os.kill(first.pid, signal.SIGSTOP)
        try:
            with pytest.raises(ManagerError, match="DEADLINE_EXCEEDED"):
                find(store, 1)
            assert find(store, 1) == 0 and put(store, 2)
        finally:
            os.kill(first.pid, signal.SIGCONT)


@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 200 OK\r\n\r\nrubbish" * 10, b"\0" * 100])
def test_what_is_no_manager(answer: bytes | None) -> None:
    """One line, within the time limit."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                if answer is not None:
                    client.sendall(answer)
                    client.close()
                else:
                    clients.append(client)

        clients = list[socket.socket]()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        begin = time.monotonic()
        with (
            closing(ManagedStore(f"127.0.0.1:{server.getsockname()[1]}", "default", 1.0)) as store,
            pytest.raises(ManagerError, match=r"^manager 127[^\n]*: got [^\n]*, expected OK$"),
        ):
            store.find(NAMESPACE, [key(1)])
        assert time.monotonic() - begin < 5
        for client in clients:
            client.close()


def test_a_group_that_the_manager_does_not_have(shared: Manager) -> None:
    with (
        closing(ManagedStore(f"127.0.0.1:{shared.ports['rpc']}", "absent", 5.0)) as store,
        pytest.raises(ManagerError, match=r"RegisterInstance: got INTERNAL_ERROR .*absent"),
    ):
        store.find(NAMESPACE, [key(1)])


class _Writer(threading.Thread):
    """A server that writes random pages until its manager is gone."""

    def __init__(self, manager: Manager, seed: int) -> None:
        super().__init__()
        self._store, self._random = opened(manager), random.Random(seed)
        self.acknowledged = set[int]()

    def run(self) -> None:
        try:
            while True:
                numbers = self._random.sample(range(_NUM_KEYS), self._random.randint(1, 12))
                new = [x for x in numbers if self._store._places(NAMESPACE, [key(x)]) == [""]]
                if new:
                    put(self._store, *new)
                # Others may still write some of them.
                self.acknowledged |= {
                    x for x in new if (NAMESPACE.key, key(x)) in self._store._seen
                }
        except ManagerError:
            self._store.close()


_NUM_KEYS = 400


@pytest.mark.sweeps
def test_killed_in_the_middle_of_writes(managers: Start, tmp_path: Path) -> None:
    """What is found is whole, and nothing that was acknowledged is lost."""
    manager = managers(store=str(tmp_path / "db"), blocks_per_file=3, apart=False)
    acknowledged, most = set[int](), 0
    for run in range(sized(3, 100)):
        writers = [_Writer(manager, run * 10 + i) for i in range(3)]
        for writer in writers:
            writer.start()
        time.sleep(random.Random(run).uniform(0.05, 0.4))
        manager.kill()
        for writer in writers:
            writer.join()
            acknowledged |= writer.acknowledged
        manager.start()
        with closing(opened(manager)) as store:
            wait_until(lambda store=store: _answers(store))
            found = {x for x in range(_NUM_KEYS) if find(store, x)}
            assert acknowledged <= found, (run, acknowledged - found)
            assert all(get(store, *found)), run
            most = max(most, len(found))
            dropped = set(random.Random(run).sample(sorted(found), len(found) // 2))
            store.remove(NAMESPACE, list(map(key, dropped)))
            wait_until(lambda store=store, gone=dropped: not any(find(store, x) for x in gone))
            acknowledged = found - dropped
    assert most > 100, "too little was written"
