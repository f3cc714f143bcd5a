"""Failures and delays between a linker's threads and a file store, while its files are cut and
flipped: a load gives the right bytes or fails, and is counted.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_storage_faults
import torch
from test_storage_faults import KEYS, OTHERS, PAGES, World

from hisparse.sglang.features.storage import calls
from hisparse.sglang.features.storage.pages import FilePages
from hisparse.storage import FileStore
from tests.processes import wait_until
from tests.sizes import sized
from tests.storage.pages import page_files

pytestmark = pytest.mark.filterwarnings("ignore")

_ROUNDS = sized(40, 1000)


class FaultyStore(FileStore):
    """A fifth of all calls fails, and a fourth takes longer than the limit.

    Attributes:
        failures: share of calls that fail.
        delay_s: most that a call is late.
    """

    failures, delay_s = 0.2, 0.02

    def _disturb(self) -> None:
        time.sleep(self.delay_s * random.random())
        if random.random() < self.failures:
            raise OSError("no answer")

    def find(self, *args: Any) -> int:
        self._disturb()
        return super().find(*args)

    def get(self, *args: Any) -> list[bool | None]:
        self._disturb()
        return super().get(*args)

    def put(self, *args: Any) -> bool:
        self._disturb()
        return super().put(*args)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(test_storage_faults, "TIMEOUT_S", 0.015)
    monkeypatch.setattr(calls, "_PAUSE_S", 0.0)
    monkeypatch.setattr(calls, "_MAX_PAUSE_S", 0.0)
    made = World(FaultyStore(tmp_path), open=FilePages)
    yield made
    made.writer.close()
    made.records.close()
    made.storage.close()


def _damage(rng: random.Random, folder: Path) -> None:
    """Flip a bit of a page, or cut one."""
    files = page_files(folder)
    sizes = {path: path.stat().st_size for path in files}
    if not (full := [path for path in files if sizes[path]]):
        return
    path = rng.choice(full)
    if rng.random() < 0.3:
        os.truncate(path, rng.randrange(sizes[path]))
        return
    with path.open("r+b") as file:
        at = rng.randrange(sizes[path])
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def test_no_wrong_byte_and_a_counter_for_each_fault(world: World, tmp_path: Path) -> None:
    rng, failed, loaded = random.Random(0), 0, 0
    world.exact.set_exact(world.pages(PAGES))
    wrong = torch.full((len(OTHERS), world.serializer.record_bytes), 7, dtype=torch.uint8)
    for _ in range(_ROUNDS):
        if rng.random() < 0.5:
            _damage(rng, tmp_path)
        if rng.random() < 0.7:
            world.offload(KEYS, PAGES)
        world.serializer.write(world.pages(OTHERS), wrong)
        if world.load():
            assert world.same()
            loaded += 1
        else:
            failed += 1
    assert world.count("failed_loads") == failed > 0
    assert world.count("loaded_pages") == loaded * len(KEYS)
    for name in ("failed_offloads", "damaged_pages", "late_calls"):
        assert world.count(name), name
    # Once the faults end, all pages are stored again.
    world.backend.failures = world.backend.delay_s = 0.0
    world.records.health.timeout_s = 20.0
    wait_until(lambda: world.offload(KEYS, PAGES) and world.load())
    assert world.same()
