"""``hisparse storage``: what it prints, what it changes, and its exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hisparse.cli import main
from hisparse.storage import FileStore
from tests.storage.pages import NAMESPACE, fill, read, segment_files

_OTHER = replace(NAMESPACE, model="smollm2-135m " * 5, num_ranks=2, rank=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with FileStore(tmp_path, 1 << 30) as store:
        fill(store, range(10))
        fill(store, range(4), _OTHER)
    return tmp_path


def _json(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> dict[str, Any]:
    assert main(["storage", *argv, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found.pop("command") == f"storage {argv[0]}"
    return found


def test_ls(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["storage", "ls", str(folder)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    words = " ".join(out.split())
    assert "14 pages, 168 KiB, in 1 segments of 168 KiB" in words
    assert NAMESPACE.key[:12] in words and _OTHER.key[:12] in words and "1/2" in words
    found = _json(capsys, "ls", str(folder))
    assert found["pages"] == 14
    assert [(x["key"], x["pages"]) for x in found["namespaces"]] == [
        (NAMESPACE.key, 10),
        (_OTHER.key, 4),
    ]
    assert found["namespaces"][1]["namespace"]["rank"] == 1


def test_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["storage", "check", str(folder)]) == 0
    assert "14 pages, 168 KiB: 0 damaged" in capsys.readouterr().out
    (file,) = segment_files(folder)
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    found = _json(capsys, "check", str(folder), code=1)
    assert [(x["offset"], x["reason"]) for x in found["damaged"]] == [(0, "checksum of part 0")]
    assert main(["storage", "check", str(folder)]) == 0


def test_gc_evicts_to_a_size(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FileStore(folder, segment_bytes=4096) as store:
        fill(store, range(20, 30))
    found = _json(capsys, "gc", str(folder), "--size", "200KiB")
    assert found["evicted"] > 0
    assert found["bytes"] > 0
    assert sum(file.stat().st_size for file in segment_files(folder)) <= 200 * 1024


def test_gc_keeps_what_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["storage", "gc", str(folder)]) == 0
    assert "0 evicted, 0 B given back" in capsys.readouterr().out


def test_rm(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    removed = _json(capsys, "rm", str(folder), "--namespace", _OTHER.key[:12])
    assert removed == {"removed": 4, "evicted": 0, "bytes": 4 * 3 * 4096, "pages": 10}
    assert _json(capsys, "rm", str(folder), "--unused-days", "1")["removed"] == 0
    with FileStore(folder) as store:
        assert all(read(store, fill(store, [99])))
    assert _json(capsys, "rm", str(folder), "--all")["removed"] == 11
    assert not segment_files(folder)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["ls", "{}/none"], "expected the folder of a store"),
        (["check", "{}/none"], "expected the folder of a store"),
        (["gc", "{}", "--size", "0.5"], "--size: got '0.5'"),
        (["rm", "{}", "--namespace", "abc"], "--namespace: got 'abc', expected one of: "),
        (["rm", "{}", "--namespace", "ffff0000"], "--namespace: got 'ffff0000', expected one of: "),
    ],
)
def test_bad_input_is_one_line(
    argv: list[str], expected: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["storage", *(word.format(folder) for word in argv)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("hisparse: error: ") and expected in line
    assert not (folder / "none").exists()


@pytest.mark.parametrize(
    "argv", [["rm", "x"], ["rm", "x", "--all", "--unused-days", "1"], ["rm", "x", "--unused-days",
             "soon"], ["gc", "x", "--live-ratio", "2"], ["ls"], []]
)  # fmt: skip
def test_a_wrong_command_line_is_one_line(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["storage", *argv])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hisparse: error: ")
