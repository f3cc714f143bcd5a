"""What an installed hisparse has: kernel sources, entry points, types. Importing it is free."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hisparse

ROOT = Path(__file__).parent.parent


def _build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a copy, so that the checkout stays clean."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        # The copy's time is now.
        shutil.copyfile(ROOT / name, copy / name)
    for name in ("bench/hisparse_bench", "csrc", "hisparse"):
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(
            ROOT / name, copy / name, symlinks=True, ignore=skip, copy_function=shutil.copyfile
        )
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    done = subprocess.run(
        [*build, "-w", str(out), str(copy)],
        env=os.environ | {"SOURCE_DATE_EPOCH": "1700000000"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(tmp_path_factory)


@pytest.fixture
def wheel(built: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(built)


def test_the_same_files_give_the_same_wheel(
    built: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever the folder and the times of the files, as ``make wheel`` promises."""
    again = _build(tmp_path_factory)
    assert again.name == built.name
    one, other = (hashlib.sha256(path.read_bytes()).hexdigest() for path in (built, again))
    assert one == other


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
        f"hisparse-{hisparse.__version__}.dist-info",
    }
    assert "hisparse/py.typed" in wheel.namelist()


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    info = f"hisparse-{hisparse.__version__}.dist-info"
    assert wheel.read(f"{info}/entry_points.txt").decode().split("\n") == [
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
def test_an_import_brings_no_package_that_may_be_absent(module: str) -> None:
    others = "{'matplotlib', 'prometheus_client', 'sglang', 'transformers'}"
    code = f"import sys, {module}; print(*{others} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
