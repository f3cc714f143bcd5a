"""``hisparse storage``: what it prints, what it changes, and its exit codes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hisparse.storage import FileStore
from tests.command import Command
from tests.storage.pages import (
    DISK_BYTES,
    NAMESPACE,
    disk_bytes,
    fill,
    key_of,
    page_file,
    page_files,
    read,
)

_OTHER = replace(NAMESPACE, model="smollm2-135m " * 5, num_ranks=2, rank=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with FileStore(tmp_path, 1 << 30) as store:
        fill(store, range(10))
        fill(store, range(4), _OTHER)
    return tmp_path


def test_ls(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = command("storage", "ls", str(folder))
    assert max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    assert "14 pages, 112 KiB" in words
    assert NAMESPACE.key[:12] in words and _OTHER.key[:12] in words and "1/2" in words
    found = command.json("storage", "ls", str(folder))
    assert found["pages"] == 14
    assert [(x["key"], x["pages"]) for x in found["namespaces"]] == [
        (NAMESPACE.key, 10),
        (_OTHER.key, 4),
    ]
    assert found["namespaces"][1]["namespace"]["rank"] == 1


def test_check(folder: Path, command: Command) -> None:
    assert "14 pages, 112 KiB: 0 damaged" in command("storage", "check", str(folder))
    file = page_file(folder, key_of(3))
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    found = command.json("storage", "check", str(folder), code=1)
    (damage,) = found["damaged"]
    assert damage.pop("reason").startswith("got checksum ")
    assert damage == {"namespace": NAMESPACE.key, "key": key_of(3)}
    assert "0 damaged" in command("storage", "check", str(folder))


def test_gc_evicts_to_a_size(folder: Path, command: Command) -> None:
    found = command.json("storage", "gc", str(folder), "--size", "60KiB")
    assert found.pop("command") == "storage gc"
    assert found == {"evicted": 7, "bytes": 7 * DISK_BYTES, "pages": 7}
    assert disk_bytes(folder) == 7 * DISK_BYTES


def test_gc_keeps_what_fits(folder: Path, command: Command) -> None:
    assert "0 pages evicted, 0 B given back" in command("storage", "gc", str(folder))


def test_rm(folder: Path, command: Command) -> None:
    removed = command.json("storage", "rm", str(folder), "--namespace", _OTHER.key[:12])
    assert removed.pop("command") == "storage rm"
    assert removed == {"removed": 4, "bytes": 4 * DISK_BYTES, "pages": 10}
    assert command.json("storage", "rm", str(folder), "--unused-days", "1")["removed"] == 0
    with FileStore(folder) as store:
        assert all(read(store, fill(store, [99])))
    assert command.json("storage", "rm", str(folder), "--all")["removed"] == 11
    assert not page_files(folder)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["ls", "{}/none"], "expected the folder of a store"),
        (["check", "{}/none"], "expected the folder of a store"),
        (["gc", "{}", "--size", "0.5"], "--size: got '0.5'"),
        (["rm", "{}", "--namespace", "abc"], "--namespace: got 'abc', expected one of: "),
        (["rm", "{}", "--namespace", "ffff0000"], "--namespace: got 'ffff0000', expected one of: "),
        (["rm", "{}"], "--all --namespace --unused-days is required"),
        (["rm", "{}", "--all", "--unused-days", "1"], "not allowed with argument --all"),
        (["rm", "{}", "--unused-days", "soon"], "--unused-days: "),
        ([], "ACTION"),
    ],
)
def test_bad_input_is_one_line(
    argv: list[str], expected: str, folder: Path, command: Command
) -> None:
    assert expected in command.refused("storage", *(word.format(folder) for word in argv))
    assert not (folder / "none").exists()
