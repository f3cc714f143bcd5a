"""The README's tables name what there is, no more and no less."""

from __future__ import annotations

import ast
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from hisparse.config import HiSparseConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def _section(title: str) -> str:
    return README.partition(f"# {title}\n")[2].partition("\n#")[0]


def _config_rows() -> dict[str, list[str]]:
    rows = [line.split(" | ") for line in _section("Every key of `--hisparse-config`").splitlines()]
    return {row[0].strip("| `"): row for row in rows if row[0].startswith("| `")}


def test_every_config_key_has_a_row() -> None:
    assert list(_config_rows()) == [f.name for f in fields(HiSparseConfig)]


@pytest.mark.parametrize(
    ("name", "default"),
    [
        (f.name, f.default)
        for f in fields(HiSparseConfig)
        if f.default is not MISSING and f.default is not None
    ],
)
def test_defaults_are_as_written(name: str, default: object) -> None:
    written = _config_rows()[name][2].strip("`")
    assert ast.literal_eval(written.capitalize() if written in ("true", "false") else written) == (
        default
    )


def test_every_metric_is_listed() -> None:
    """Without an import of SGLang's part: names are read from its source."""
    tree = ast.parse((ROOT / "hisparse" / "sglang" / "metrics.py").read_text())
    tables = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    }
    known = {f"{name}_total" for name in tables["_COUNTERS"]} | set(tables["_GAUGES"])
    assert set(re.findall(r"`(\w+)`", _section("Metrics"))) == known


def test_make_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
