"""A lookup of many pages is exact in any state of a store, and takes few statements."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from hisparse.storage import FileStore, index
from hisparse.storage.namespace import BLOCK_BYTES, Header, record_bytes
from tests.sizes import sized
from tests.storage.pages import NAMESPACE, contents, fill, key_of, read

_PAGE = replace(NAMESPACE, part_bytes=(1,))
_OTHER = replace(_PAGE, model="other")


def _prefix(keys: Sequence[str], is_stored: Callable[[str], bool]) -> int:
    """The definition."""
    return next((i for i, key in enumerate(keys) if not is_stored(key)), len(keys))


def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few pages then take many runs and walks."""
    for name, value in {"_FEW": 3, "_MANY": 9, "_SHORT": 2, "_BATCH": 4}.items():
        monkeypatch.setattr(index, name, value)


@pytest.mark.parametrize("seed", range(sized(3, 100)))
def test_any_state_of_a_store_agrees_with_the_definition(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are interleaved, by two processes, with holes, and with keys of several lengths."""
    _small_steps(monkeypatch)
    rng, stored = random.Random(seed), set[str]()
    # Where a key ends does not show when keys of other lengths are joined.
    keys = [(key_of(i) * 2)[: 2 * rng.choice((1, 32, 32, 32, 33))] for i in range(60)]
    with FileStore(tmp_path, segment_bytes=1 << 17) as one, FileStore(tmp_path) as two:
        for _ in range(12):
            start, store = rng.randrange(60), rng.choice((one, two))
            for key in keys[start : start + rng.randrange(40)]:
                store.put(_PAGE, key, b"x")
                stored.add(key)
                if rng.random() < 0.2:
                    store.put(_OTHER, rng.choice(keys), b"y")
            if rng.random() < 0.5:
                gone = rng.sample(keys, rng.choice((1, 1, 10)))
                store.remove(_PAGE, gone)
                stored -= set(gone)
                store.collect(1.0)
            for _ in range(20):
                start = rng.randrange(60)
                asked = keys[start:] + rng.sample(keys, 3) + keys[: rng.randrange(60)]
                if rng.random() < 0.3:
                    rng.shuffle(asked)
                assert two.find(_PAGE, asked) == _prefix(asked, stored.__contains__)


def test_a_hole_of_evicted_pages_ends_the_prefix(tmp_path: Path) -> None:
    """What host memory kept was not read from the store, so it left first."""
    now = 1000
    size = 256 * record_bytes(_PAGE.page_bytes)
    with FileStore(tmp_path, size, segment_bytes=1 << 16, clock=lambda: now) as store:
        keys = fill(store, range(200), _PAGE)
        now = 2000
        assert all(read(store, keys[:50] + keys[150:], _PAGE))
    # Closed, so that it has written which pages were read, and collects no more.
    with FileStore(tmp_path, size // 2, segment_bytes=1 << 16, clock=lambda: now) as smaller:
        smaller.collect()
        assert 50 <= smaller.find(_PAGE, keys) < 150
        assert smaller.find(_PAGE, keys[150:]) == 50


def test_with_a_time_to_live_pages_read_just_now_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _small_steps(monkeypatch)
    rng, now, used = random.Random(0), 1000, dict[str, int]()
    keys = [key_of(i) for i in range(40)]
    with FileStore(tmp_path, policy="ttl", ttl_s=100.0, clock=lambda: now) as store:
        for _ in range(60):
            now += rng.choice((0, 0, 30, 60))
            fresh = {key for key in keys if used.get(key, 0) >= now - 100}
            start = rng.randrange(40)
            part = keys[start : start + rng.randrange(20)]
            if rng.random() < 0.5:
                assert read(store, part, _PAGE) == [key in fresh for key in part]
                used |= dict.fromkeys(fresh & set(part), now)
            else:
                for key in part:
                    if store.put(_PAGE, key, contents(key, _PAGE)):
                        used[key] = now
            fresh = {key for key in keys if used.get(key, 0) >= now - 100}
            assert store.find(_PAGE, keys[start:]) == _prefix(keys[start:], fresh.__contains__)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path, 1 << 40) as store:
        yield store


def _index(store: FileStore, runs: Sequence[Sequence[str]]) -> None:
    """Let the index know of pages, each run of them in a place of its own."""
    size, offset, pages = record_bytes(_PAGE.page_bytes), 0, []
    for run in runs:
        offset += BLOCK_BYTES
        for key in run:
            pages.append((offset, Header(_PAGE, bytes.fromhex(key), size, 1000.0, (0,))))
            offset += size
    store._folder.index.recover(1000, pages)


@contextmanager
def _statements(store: FileStore) -> Iterator[list[str]]:
    seen: list[str] = []
    connection = store._folder.index._reads
    connection.set_trace_callback(seen.append)
    yield seen
    connection.set_trace_callback(None)


_MANY_KEYS = [key_of(i) for i in range(10_000)]


@pytest.mark.parametrize(
    ("run", "most"), [(10_000, 12), (512, 40), (1, 70)], ids=["one run", "runs of 512", "scattered"]
)
def test_ten_thousand_pages_take_few_statements(store: FileStore, run: int, most: int) -> None:
    """One for each key, and rows of each, would keep a server's scheduler for half a second."""
    runs = [_MANY_KEYS[i : i + run] for i in range(0, 10_000, run)]
    random.Random(0).shuffle(runs)
    _index(store, runs)
    hole = [*_MANY_KEYS[:5000], key_of(-1), *_MANY_KEYS[5001:]]
    for keys, expected in ((_MANY_KEYS, 10_000), (hole, 5000)):
        with _statements(store) as seen:
            assert store.find(_PAGE, keys) == expected
        assert len(seen) <= most


def test_absent_pages_take_two_statements(store: FileStore) -> None:
    _index(store, [_MANY_KEYS[1:100]])
    assert store.find(_PAGE, _MANY_KEYS[1:100]) == 99
    for _ in range(2):
        with _statements(store) as seen:
            assert store.find(_PAGE, _MANY_KEYS) == 0
        assert len(seen) == 2
