"""Contexts: which of them begin with a prefix, and what their file promises."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pages import NAMESPACE, key_of

from hisparse.errors import ConfigError, HiSparseError
from hisparse.storage import Contexts, page_keys

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


def test_keys_are_those_of_sglang() -> None:
    """As SGLang 0.5.23 prints them; tests/sglang/test_storage_key.py asks it."""
    assert page_keys(np.arange(40), 16) == [
        "5d85718ec594b982c252d0279e5966ffca33a5eaf2a455038d3ab331fde70cea",
        "4681c0107c38f402cd1bc30b0b09a65202dba31f98269d9d7f63f5e0dea6901a",
    ]
    assert page_keys(np.array([0, 1, 2**32 - 1, 5]), 2) == [
        "01acecb507abfe1a354aa8064f4af5d3f1acd019e37db3c11c97523b71c76e9d",
        "baa98db2b5f5dc0df2b76f89e23f123bc4ff04e974f4ba70489f740b1b2420db",
    ]


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


def test_a_folder_that_cannot_be_written(
    contexts: Contexts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = contexts.add(KEYS, 320, {"lang": "en"})
    contexts.close()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    reader = Contexts(tmp_path, NAMESPACE)
    assert reader.all() == [stored] and reader.longest(KEYS, lambda a: True) == 20
    with pytest.raises(HiSparseError, match="attempt to write a readonly database"):
        reader.add(BRANCH, 272, {})
    reader.close()
    (tmp_path / "none").mkdir()
    empty = Contexts(tmp_path / "none", NAMESPACE)
    assert empty.all() == [] and not list((tmp_path / "none").iterdir())
    empty.close()


def test_a_file_of_another_version(contexts: Contexts, tmp_path: Path) -> None:
    contexts.close()
    database = sqlite3.connect(tmp_path / "contexts.sqlite")
    database.execute("PRAGMA user_version = 7")
    database.close()
    with pytest.raises(HiSparseError, match="got contexts of version 7, expected 1"):
        Contexts(tmp_path, NAMESPACE)


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
