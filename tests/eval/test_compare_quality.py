"""``scripts/compare_quality.py``: a divergence that grew fails, other documents are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.compare_quality import main


def result(
    kl: float, *, ppl: float = 30.0, context: int = 4096, model: str = "m"
) -> dict[str, Any]:
    dense = {"method": "dense", "budget": 128, "context": context, "kl": 0.0, "ppl": ppl}
    sketch = {"method": "sketch", "budget": 256, "context": context, "kl": kl, "ppl": 1.1 * ppl}
    return {"model": model, "dtype": "bfloat16", "summary": [dense, sketch]}


def run(folder: Path, before: dict[str, Any], after: dict[str, Any]) -> int:
    files = []
    for name, content in (("before", before), ("after", after)):
        files.append(folder / f"{name}.json")
        files[-1].write_text(json.dumps(content))
    return main([str(file) for file in files])


@pytest.mark.parametrize(("after", "code"), [(0.05, 0), (0.0505, 0), (0.03, 0), (0.052, 1)])
def test_only_a_divergence_that_grew_fails(
    after: float, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, result(0.05), result(after)) == code
    out = capsys.readouterr().out
    assert out.startswith(f"sketch, 256 of 4096: 0.0500 -> {after:.4f} nats per token")
    assert ("worse" in out) == bool(code)


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (result(0.05, ppl=40.0), "expected the same documents"),
        (result(0.05, model="other"), "model: got m and other"),
        (result(0.05, context=8192), "share no method"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    after: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, result(0.05), after) == 2
    assert words in capsys.readouterr().err
