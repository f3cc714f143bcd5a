"""Files of an evaluation that was interrupted or damaged, or whose disk was full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hisparse.errors import ConfigError
from hisparse.eval.results import RecordKey, Records
from tests.eval.synthetic_records import record
from tests.processes import largest_file


def line(document: str) -> dict[str, Any]:
    return record(document, "quest", kl=[0.1], continued=[-1.0]) | {"config": "00000000"}


@pytest.fixture
def records(tmp_path: Path) -> Records:
    records = Records(tmp_path)
    for document in "ab":
        records.append(line(document))
    return records


def test_a_torn_line_is_cut_off_and_the_others_stay(records: Records, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:70])
    assert [key.document for key in records.read()] == ["a", "b"]
    assert file.read_bytes() == whole
    file.write_bytes(whole[:70])
    assert records.read() == {} and file.read_bytes() == b""
    file.write_bytes(whole.replace(b"\n", b"\r\n") + whole[:70])
    assert [key.document for key in records.read()] == ["a", "b"]
    assert file.read_bytes() == whole.replace(b"\n", b"\r\n")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (b"{}", "got no algorithm, budget"),
        (b"[1]", "got [1] (list), expected an object"),
        (b'{"kl": 1', "not JSON at line 1"),
        (b"\xff", "not UTF-8 text"),
        (json.dumps(line("b") | {"kl": "0.1"}).encode(), "kl: got '0.1' (str), expected a list"),
        (json.dumps(line("b") | {"items": [1]}).encode(), "items[0]: got 1, expected an object"),
    ],
)
def test_a_line_that_is_no_record_is_named(
    records: Records, tmp_path: Path, damage: bytes, message: str
) -> None:
    file = tmp_path / "records.jsonl"
    first, _ = file.read_bytes().splitlines()
    content = first + b"\n" + damage + b"\n"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        records.read()
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert str(file) in str(caught.value)
    assert "line 2" in str(caught.value) or "UTF-8" in message
    assert file.read_bytes() == content, "nothing is lost"


def test_a_disk_that_is_full_cuts_a_line_and_the_others_stay(tmp_path: Path) -> None:
    records, whole = Records(tmp_path), json.dumps(line("first")) + "\n"
    records.append(line("first"))
    with largest_file(len(whole) + 50), pytest.raises(OSError, match="File too large"):
        records.append(line("second"))
    file = tmp_path / "records.jsonl"
    assert file.stat().st_size == len(whole) + 50, "the disk was full in the middle of a line"
    with largest_file(1):
        assert list(records.read()) == [RecordKey("first", "quest", 64, "00000000")]
    assert file.read_text() == whole
