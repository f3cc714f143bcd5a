"""The script that measures reads: its result is checked bytes and figures of both readers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import storage_speed


def test_a_small_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "speed.json"
    sizes = ["--bytes", "3000000", "--page-bytes", "100001", "--parts", "3", "--batch", "7"]
    try:
        code = storage_speed.main([str(out), *sizes, "--rounds", "2"])
    except SystemExit as stopped:
        pytest.skip(f"the file system has no page cache to drop: {stopped}")
    found = json.loads(out.read_text())
    assert [case["name"] for case in found["cases"]] == ["cold", "warm"]
    for case in found["cases"]:
        assert case["gate"] == "passed"
        assert {name: len(rates) for name, rates in case["bytes_per_second"].items()} == {
            "dd": 2,
            "dd large": 2,
            "get": 2,
        }
    # How fast so small a store is says nothing.
    assert code in (0, 1)
    assert list(tmp_path.iterdir()) == [out]
    assert "bytes passed" in capsys.readouterr().out
