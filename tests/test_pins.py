"""Pins stand in two files; they agree, and the set-up has no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")

ROOT = Path(__file__).parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def _pins(lines: list[str]) -> dict[str, str]:
    found = {}
    for line in lines:
        name, _, version = line.partition("==")
        found[re.sub(r"[-_.]+", "-", name).lower()] = version
    return found


def _file(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return _pins([line for line in lines if line and not line.startswith("#")])


CPU, CONSTRAINTS = _file("cpu.txt"), _file("constraints.txt")


@pytest.mark.parametrize("extra", ["cpu", "dev"])
def test_extras_are_pinned_as_the_set_up_is(extra: str) -> None:
    pins = _pins(EXTRAS[extra])
    assert pins == {name: (CPU | CONSTRAINTS).get(name) for name in pins}


def test_every_requirement_of_the_set_up_is_exact() -> None:
    assert all(re.fullmatch(r"\d[\w.]*", version) for version in (CPU | CONSTRAINTS).values())


def test_the_set_up_brings_neither_cuda_nor_what_the_stand_ins_stand_for() -> None:
    names = set(CPU) | set(CONSTRAINTS)
    assert not names & {"torchvision", "sgl-kernel", "sglang-kernel"}
    assert not [name for name in names if name.startswith("nvidia") or "-cu1" in name]


def test_one_range_of_sglang() -> None:
    """The set-up takes the newest that the extra allows, and the doctor says the same."""
    from hisparse.sglang.compat import NEWEST, OLDEST

    assert EXTRAS["sglang"] == [f"sglang>={OLDEST},<={NEWEST}"]
    assert f'sglang="sglang=={NEWEST}"' in (ROOT / "scripts" / "setup.sh").read_text()
    assert f"{OLDEST} to {NEWEST}" in (ROOT / "docs" / "operations.md").read_text()
