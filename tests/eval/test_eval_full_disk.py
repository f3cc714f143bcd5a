"""Files of an evaluation on a full disk: one line, and what was there is still there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hisparse.eval.results import RecordKey, Records
from tests.command import Command
from tests.processes import largest_file

RESULT = Path(__file__).with_name("smollm2-1k.json")


def record(document: str) -> dict[str, Any]:
    return {"document": document, "method": "quest", "budget": 256, "config": "00000000"}


def test_records_that_were_written_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Records, "_parse", lambda _self, _n, line: json.loads(line), raising=False)
    records = Records(tmp_path)
    records.append(record("first"))
    with largest_file(150), pytest.raises(OSError, match="File too large"):
        records.append(record("second"))
    path = tmp_path / "records.jsonl"
    assert path.stat().st_size == 150, "the disk was full in the middle of a line"
    with largest_file(1):
        assert list(records.read()) == [RecordKey("first", "quest", 256, "00000000")]
    assert path.read_text() == json.dumps(record("first")) + "\n"


@pytest.mark.parametrize("suffix", [".md", ".html"])
def test_a_report_keeps_the_older_one(tmp_path: Path, suffix: str, command: Command) -> None:
    file = tmp_path / f"report{suffix}"
    file.write_text("an older report")
    with largest_file(100):
        said = command.refused("eval", "--from", str(RESULT), "--report", str(file))
    assert said == f"hisparse: error: --report: cannot write {str(file)!r}: File too large\n"
    assert file.read_text() == "an older report"
    assert list(tmp_path.iterdir()) == [file]
