"""Contexts: which of them begin with a prefix, and what their file promises."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hisparse.errors import ConfigError, HiSparseError
from hisparse.storage import Contexts, FileStore, page_keys
from tests.storage.pages import DISK_BYTES, NAMESPACE, contents, fill, key_of

KEYS = [key_of(i) for i in range(20)]
BRANCH = [*KEYS[:7], *(key_of(i) for i in range(100, 110))]


@pytest.fixture
def contexts(tmp_path: Path) -> Iterator[Contexts]:
    made = Contexts(tmp_path, NAMESPACE)
    yield made
    made.close()


def test_a_key_names_its_page_and_all_before() -> None:
    ids = np.arange(100)
    keys = page_keys(ids, 16)
    assert len(keys) == len(set(keys)) == 6
    assert page_keys(ids[:50], 16) == keys[:3]
    changed = page_keys(np.where(ids == 40, 7, ids), 16)
    assert [a == b for a, b in zip(keys, changed, strict=True)] == [True, True, *[False] * 4]
    assert page_keys(ids[:15], 16) == []


def test_the_longest_prefix_that_an_accepted_context_has(contexts: Contexts) -> None:
    contexts.add(KEYS, 320, {"lang": "en"})
    contexts.add(BRANCH, 272, {"lang": "de", "tags": ["a", None, 1.5]})
    asked: list[object] = []
    assert contexts.longest(KEYS, lambda a: asked.append(a) or True) == 20
    assert len(asked) <= 2, "a context is asked for once"
    assert contexts.longest(KEYS[:5], lambda a: True) == 5
    assert contexts.longest(KEYS, lambda a: a["lang"] == "de") == 7
    assert contexts.longest([*BRANCH, key_of(500)], lambda a: "tags" in a) == 17
    assert contexts.longest(KEYS, lambda a: False) == 0
    assert contexts.longest([], lambda a: True) == 0


def test_namespaces_and_instances(contexts: Contexts, tmp_path: Path) -> None:
    first = contexts.add(KEYS, 320, {})
    other = Contexts(tmp_path, replace(NAMESPACE, model="other"))
    again = Contexts(tmp_path, NAMESPACE)
    assert other.all() == [] and other.longest(KEYS, lambda a: True) == 0
    assert again.all() == [first] and again.add(KEYS, 320, {}) == first
    assert other.add(KEYS, 320, {}) not in (None, first)
    assert again.remove(first.id) and contexts.all() == []
    assert contexts.add([], 0, {}) is None
    for each in (other, again):
        each.close()


def num_keys(folder: Path) -> int:
    """Keys in the file of contexts."""
    with contextlib.closing(sqlite3.connect(folder / "contexts.sqlite")) as database:
        sizes = database.execute("SELECT sum(length(keys) / length(first)) FROM branches")
        return int(sizes.fetchone()[0] or 0)


def test_a_conversation_takes_bytes_for_its_new_pages(contexts: Contexts, tmp_path: Path) -> None:
    keys = [key_of(i) for i in range(400)]
    for turn in range(10, 401, 10):
        assert contexts.add(keys[:turn], 16 * turn, {"turn": turn})
    assert num_keys(tmp_path) == 400
    assert contexts.longest(keys, lambda a: a["turn"] <= 250) == 250
    assert contexts.longest(keys[:33], lambda a: a["turn"] == 400) == 33
    for each in contexts.all()[::-1]:
        # What no other context has goes with a context.
        assert num_keys(tmp_path) == each.num_tokens // 16
        assert contexts.remove(each.id)
    assert num_keys(tmp_path) == 0


@pytest.mark.parametrize("seed", range(3))
def test_contexts_that_branch_anywhere(contexts: Contexts, tmp_path: Path, seed: int) -> None:
    """The tree says of each prompt what a list of all contexts says."""
    rng, model = random.Random(seed), {}
    for _ in range(60):
        # Few tokens, so that contexts share prefixes of all lengths.
        ids = rng.choices([0, 1], weights=[3, 1], k=rng.randrange(1, 12))
        keys, kind = page_keys(np.array(ids), 1), rng.randrange(3)
        if rng.random() < 0.7:
            added = contexts.add(keys, len(ids), {"kind": kind})
            assert added is not None and model.setdefault(added.id, (keys, kind)) == (keys, kind)
        elif model:
            number = rng.choice(list(model))
            assert contexts.remove(number) and model.pop(number)
        expected = 0
        for other, its_kind in model.values():
            shared = sum(a == b for a, b in zip(keys, other, strict=False))
            expected = max(expected, shared if its_kind == kind else 0)
        assert contexts.longest(keys, lambda a: a["kind"] == kind) == expected  # noqa: B023
        assert num_keys(tmp_path) == len({key for other, _ in model.values() for key in other})


def test_contexts_go_with_their_last_page(tmp_path: Path, contexts: Contexts) -> None:
    with FileStore(tmp_path) as store, FileStore(tmp_path) as other:
        keys = fill(store, range(20)) + fill(store, range(100, 110))
        fill(store, range(20), replace(NAMESPACE, model="other"))
        ids = [contexts.add(x, 0, {}).id for x in (KEYS, KEYS[:5], BRANCH, KEYS[:8])]
        gone = [*keys[:6], *keys[7:]]
        for number, key in enumerate(gone):
            store.remove(NAMESPACE, [key])
            if number in (0, len(gone) - 1):
                other.collect()
                left = ids if not number else [ids[0], *ids[2:]]
                assert [x.id for x in contexts.all()] == left
        store.remove(NAMESPACE)
        other.collect()
        assert contexts.all() == [] and num_keys(tmp_path) == 0


def test_contexts_count_towards_the_size(tmp_path: Path, contexts: Contexts) -> None:
    """Pages leave to make room for contexts, and contexts leave with them."""
    with FileStore(tmp_path, 1 << 20) as store:
        store._evictor.run_soon = lambda room: None  # type: ignore[method-assign]
        keys = fill(store, range(20))
        for number in range(20):
            contexts.add([keys[number]], 16, {"text": "x" * (64 << 10)})
        contexts.close()
        assert not store.put(NAMESPACE, key_of(50), contents(key_of(50)))
        assert store.counters["refused_size"] == 1
        store.collect()
        assert (tmp_path / "contexts.sqlite").stat().st_size < 256 << 10
        fill(store, range(50, 60))


def test_a_file_of_another_version(
    tmp_path: Path, contexts: Contexts, caplog: pytest.LogCaptureFixture
) -> None:
    """It is refused; a collection goes on beside it."""
    contexts.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "contexts.sqlite")) as database:
        database.execute("PRAGMA user_version = 1")
    message = "got contexts of version 1, expected 3, or no such file"
    with pytest.raises(HiSparseError, match=message):
        Contexts(tmp_path, NAMESPACE)
    with FileStore(tmp_path) as store:
        fill(store, range(20))
        assert store.collect(10 * DISK_BYTES) > 0
    assert message in caplog.text


def test_a_folder_that_cannot_be_written(
    contexts: Contexts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = contexts.add(KEYS, 320, {"lang": "en"})
    contexts.close()
    monkeypatch.setattr(os, "access", lambda path, mode, **_: mode == os.F_OK)
    reader = Contexts(tmp_path, NAMESPACE)
    assert reader.all() == [stored] and reader.longest(KEYS, lambda a: True) == 20
    with pytest.raises(HiSparseError, match="attempt to write a readonly database"):
        reader.add(BRANCH, 272, {})
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_, **__: True)
        writer = Contexts(tmp_path, NAMESPACE)
    for turn in range(30):
        writer.add([key_of(i) for i in range(turn, 20 + turn)], 320, {"text": "x" * 5000})
    writer._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    writer.close()
    assert reader.all() == [stored] and reader.longest(KEYS, lambda a: True) == 20
    reader.close()
    (tmp_path / "none").mkdir()
    empty = Contexts(tmp_path / "none", NAMESPACE)
    assert empty.all() == [] and not list((tmp_path / "none").iterdir())
    empty.close()


@pytest.mark.parametrize("attributes", [{"a": {1}}, {"a": float("nan")}, {1: 2}, {"a": (1, 2)}])
def test_attributes_are_json(contexts: Contexts, attributes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="attributes: got .* expected a JSON object such as"):
        contexts.add(KEYS, 320, attributes)
    assert contexts.all() == []


def test_damage_is_one_line_and_an_error_of_a_filter_is_its_own(
    contexts: Contexts, tmp_path: Path
) -> None:
    contexts.add(KEYS, 320, {})
    with pytest.raises(KeyError, match="lang"):
        contexts.longest(KEYS, lambda a: a["lang"] == "en")
    database = sqlite3.connect(tmp_path / "contexts.sqlite")
    with database:
        database.execute("UPDATE contexts SET attributes = '{'")
    database.close()
    for call in (contexts.all, lambda: contexts.longest(KEYS, lambda a: True)):
        with pytest.raises(HiSparseError, match=r"contexts.sqlite': JSONDecodeError: .*no such"):
            call()
