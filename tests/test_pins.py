"""Pins stand in two files; they agree, and the set-up has no others."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

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
    pins = [line for line in lines if line and not line.startswith(("#", " "))]
    return _pins([line.removesuffix(" \\") for line in pins])


#: Every file of pins but that of torch, whose CPU builds come from another index.
HASHED = sorted({x.name for x in ROOT.glob("requirements/*.txt")} - {"constraints.txt"})
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


@pytest.mark.parametrize("name", HASHED)
def test_every_pin_has_hashes_of_its_files(name: str) -> None:
    """``make pins`` writes them. pip then refuses a file that has another one."""
    text = (ROOT / "requirements" / name).read_text()
    pins = re.findall(r"^[^#\s].*(?:\n +.*)*", text, re.MULTILINE)
    assert len(pins) == len(_file(name))
    digest = r" \\\n    --hash=sha256:[0-9a-f]{64}"
    assert [pin for pin in pins if not re.fullmatch(rf"\S+==\S+(?:{digest})+", pin)] == []


def test_the_set_up_installs_nothing_whose_hash_is_not_pinned() -> None:
    scripts = (ROOT / "scripts" / "setup.sh").read_text() + (ROOT / "Makefile").read_text()
    for name in HASHED:
        assert f"--require-hashes -r requirements/{name}" in scripts


@pytest.mark.skipif(torch.version.cuda is not None, reason="the page is of the CPU set-up")
def test_licences_are_those_of_the_installed_packages(tmp_path: Path) -> None:
    # A process of its own: other tests add folders of packages to the path of this one.
    made, page = tmp_path / "made.md", (ROOT / "docs" / "licences.md").read_text(encoding="utf-8")
    script = [sys.executable, "-m", "scripts.make_licences", str(made)]
    subprocess.run(script, cwd=ROOT, check=True)
    assert made.read_text(encoding="utf-8") == page, "make licences"
    listed = set(re.findall(r"[\w-]+", page))
    assert {"torch", "numpy", "psutil", "rich", "sglang", "transformers"} <= listed


def test_one_release_of_sglang() -> None:
    """The set-up, the extra, the start of a server and the docs name the same one."""
    from hisparse.sglang.install import RELEASE

    assert EXTRAS["sglang"] == [f"sglang=={RELEASE}"]
    assert _file("sglang.txt") == {"sglang": RELEASE}
    for page in ("README.md", "docs/operations.md"):
        assert f"only {RELEASE}" in (ROOT / page).read_text()
