"""SIGKILL in the middle of writes: what serves is whole, what was acknowledged is there."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
import requests

from tests.kvcm.manager import Client, Manager, ManagerError, path_of, store_bytes, uris, wait_until
from tests.sizes import sized

Start = Callable[..., Manager]
_NUM_KEYS = 400


def _bytes(key: int) -> bytes:
    return key.to_bytes(8, "little") * 8


class _Writer(threading.Thread):
    """An engine that writes random blocks until its manager is gone.

    Args:
        client: of its own.
        seed: of what it does.
    """

    def __init__(self, client: Client, seed: int) -> None:
        super().__init__()
        self._client = client
        self._random = random.Random(seed)
        self.acknowledged: dict[int, str] = {}
        self.finishing: dict[int, str] = {}

    def run(self) -> None:
        try:
            while True:
                self._write()
        except (requests.RequestException, grpc.RpcError):
            return

    def _write(self) -> None:
        keys = self._random.sample(range(_NUM_KEYS), self._random.randint(1, 20))
        begun = self._client.write(keys, seconds=self._random.choice([2, 1000]))
        mask = begun["block_mask"]
        skipped = mask.get("bool_masks", {}).get("values") or [
            at < mask.get("offset", 0) for at in range(len(keys))
        ]
        new = [key for key, skip in zip(keys, skipped, strict=True) if not skip]
        good = [self._random.random() < 0.8 for _ in new]
        for key, uri, whole in zip(new, uris(begun), good, strict=True):
            store_bytes(uri, _bytes(key) if whole else b"torn".ljust(64))
        done = {x: y for x, y, z in zip(new, uris(begun), good, strict=True) if z}
        self.finishing = done
        try:
            self._client.finish(begun, good)
        except ManagerError:  # The session expired.
            return
        self.finishing = {}
        self.acknowledged |= done


@pytest.mark.sweeps
@pytest.mark.parametrize("kind", ["file", "redis"])
def test_killed_in_the_middle_of_writes(
    managers: Start, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    place = request.getfixturevalue("redis_url") if kind == "redis" else str(tmp_path / "db")
    manager = managers(store=place, blocks_per_file=3)
    manager.http.register()
    acknowledged: dict[int, str] = {}
    for run in range(sized(3, 100)):
        clients = [Client(manager, x) for x in ("http", "grpc", "grpc")]
        writers = [_Writer(client, run * 10 + at) for at, client in enumerate(clients)]
        for writer in writers:
            writer.start()
        time.sleep(random.Random(run).uniform(0.05, 0.4))
        manager.kill()
        for writer in writers:
            writer.join()
        for client in clients:
            client.close()
        manager.start()
        maybe = {}
        for writer in writers:
            acknowledged |= writer.acknowledged
            maybe |= writer.finishing
        found = {key: uri for key in range(_NUM_KEYS) for uri in manager.grpc.match([key])}
        for key, uri in found.items():
            block = _read(uri)
            assert block == _bytes(key), (run, key, uri, block)
        lost = {x: y for x, y in acknowledged.items() if found.get(x) != y}
        assert not lost, (run, lost)
        unknown = {x: y for x, y in found.items() if y not in (acknowledged.get(x), maybe.get(x))}
        assert not unknown, (run, unknown)
        acknowledged = found
    _nothing_is_left(manager)


def _read(uri: str) -> bytes:
    _, _, query = uri.partition("?")
    place = int(dict(part.split("=") for part in query.split("&"))["blkid"])
    return path_of(uri).read_bytes()[place * 64 :][:64]


def _nothing_is_left(manager: Manager) -> None:
    """Nor is a file left."""
    client = manager.http
    client.admin("removeInstance", instance_id="i")
    wait_until(lambda: client.metric("cache_manager_group.usage_ratio") == 0)
    assert [x for x in manager.root.glob("*/*/*") if x.is_file()] == []


def test_a_session_survives_its_manager(managers: Start, tmp_path: Path) -> None:
    manager = managers(store=str(tmp_path / "kvcm.db"))
    manager.http.register()
    begun = manager.http.write([1, 2, 3])
    short = manager.http.write([4], seconds=1)
    manager.kill()
    manager.start()
    client = manager.http
    assert client.states([1, 4]) == ["WRITING"] * 2
    client.finish(begun, [True, False, True])
    assert client.match([1]) == uris(begun)[:1]
    wait_until(lambda: client.states([2, 4]) == ["NOT_FOUND"] * 2)
    with pytest.raises(ManagerError, match="INTERNAL_ERROR"):
        client.finish(short, [True])
    assert len(client.write([2, 4])["locations"]) == 2


def test_a_deletion_goes_on_after_its_delay(managers: Start, tmp_path: Path) -> None:
    manager = managers(store=str(tmp_path / "kvcm.db"), delay_ms=1500)
    manager.http.register()
    (uri,) = manager.http.put([1])
    store_bytes(uri, b"x" * 64)
    manager.http.meta("removeCache", instance_id="i", block_keys=[1])
    begin = time.monotonic()
    manager.kill()
    manager.start()
    assert manager.http.states([1]) == ["DELETING"]
    assert manager.http.match([1]) == []
    assert manager.http.write([1])["locations"] == []
    assert path_of(uri).exists()
    wait_until(lambda: not path_of(uri).exists())
    assert time.monotonic() - begin > 1.4
    wait_until(lambda: manager.http.states([1]) == ["NOT_FOUND"])
