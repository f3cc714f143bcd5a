"""What an installed hisparse has: kernel sources, entry points, types. Importing it is free."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, so that the checkout stays clean."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("hisparse", "csrc", "bench/hisparse_bench"):
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=skip)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    done = subprocess.run(
        [*build, "-w", str(out), str(copy)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(out.glob("*.whl")))


def test_kernel_sources_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.is_file()]
    assert sources
    for source in sources:
        inside = f"hisparse/_csrc/{source.relative_to(ROOT / 'csrc')}"
        assert wheel.read(inside) == source.read_bytes(), inside


def test_nothing_but_the_packages_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    assert {name.split("/")[0] for name in wheel.namelist()} == {
        "hisparse",
        "hisparse_bench",
        "hisparse-0.1.0.dist-info",
    }
    assert "hisparse/py.typed" in wheel.namelist()


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    assert wheel.read("hisparse-0.1.0.dist-info/entry_points.txt").decode().split("\n") == [
        "[console_scripts]",
        "hisparse = hisparse.cli:main",
        "",
        "[sglang.srt.plugins]",
        "hisparse = hisparse.sglang:activate",
        "",
    ]


@pytest.mark.parametrize(
    "module", ["hisparse", "hisparse.cli", "hisparse.eval.models", "hisparse.sglang"]
)
def test_an_import_brings_neither_sglang_nor_transformers(module: str) -> None:
    code = f"import sys, {module}; print(*{{'sglang', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
