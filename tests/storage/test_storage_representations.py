"""The script that measures representations: what was stored equals what is built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import storage_representations
from tests.server.tiny_models import tiny_model


def test_a_short_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "cost.json"
    arguments = [str(out), "--model", str(tiny_model("llama")), "--dtype", "float32"]
    assert storage_representations.main([*arguments, "--tokens", "256", "--rounds", "2"]) == 0
    found = json.loads(out.read_text())
    assert [case["name"] for case in found["cases"]] == ["sketch", "quest"]
    for case in found["cases"]:
        assert case["gate"] == "passed"
        assert {len(each) for each in case["seconds"].values()} == {2}
        assert 0 < case["share_of_kv"] < 1
    assert list(tmp_path.iterdir()) == [out]
    assert capsys.readouterr().out.count("equal: passed") == 2
    with pytest.raises(SystemExit, match="snapkv: got no representations of pages"):
        storage_representations.main([*arguments, "--algorithm", "snapkv"])
