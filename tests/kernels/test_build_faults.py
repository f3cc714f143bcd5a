"""Builds that are killed, that run side by side, and that find a full disk."""

from __future__ import annotations

import logging
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hisparse.kernels.build import compiler
from hisparse.kernels.build import cpu as build
from hisparse.kernels.build.cache import is_intact
from tests.kernels.conftest import FLAGS, SOURCE
from tests.processes import largest_file, wait_until

#: A builder of the same small library in a process of its own.
BUILDER = textwrap.dedent(
    f"""
    import sys
    from pathlib import Path
    from hisparse.kernels.build import cpu as build

    build._SOURCES, build.CACHE = map(Path, sys.argv[1:])
    build._FLAGS = {FLAGS}
    print(build.cpu_library().forty_two())
    """
)


@pytest.fixture
def cache(sources: Path) -> Path:
    """The empty cache of a small library that is built in place of the real one."""
    return sources.parent / "cache"


def start_builder(cache: Path) -> subprocess.Popen[str]:
    line = [sys.executable, "-c", BUILDER, str(cache.parent / "csrc"), str(cache)]
    return subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def use_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Let a shell script stand before the compiler; ``$out`` is what it should write."""
    path = folder / "compiler"
    real = shutil.which("g++")
    head = f'#!/bin/sh\nfor out in "$@"; do :; done\ncd {folder}\n'
    version = f'[ "$1" = --version ] && exec {real} --version\n'
    path.write_text(f'{head}{version}{textwrap.dedent(script)}\n{real} "$@"')
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def only_whole_files(cache: Path) -> bool:
    """Whether a cache holds only libraries and objects with their digests, and empty locks."""
    files = {path for path in cache.rglob("*") if path.is_file()}
    whole = {path for path in files if path.suffix in (".so", ".o") and is_intact(path)}
    digests = {path.with_name(f"{path.name}.sha256") for path in whole}
    locks = {path for path in files if path.suffix == ".lock" and path.stat().st_size == 0}
    folders = {path for path in cache.rglob("*") if path.is_dir()}
    return files == whole | digests | locks and folders <= {cache / "objects"}


def test_a_compiler_that_is_killed(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As by a machine that runs out of memory: this start goes without, the next one builds."""
    script = "mkdir killed && echo half > $out && kill -9 $$"
    use_compiler(monkeypatch, cache.parent, script)
    with caplog.at_level(logging.WARNING):
        assert build.cpu_library() is None
    (record,) = caplog.records
    assert record.message.endswith("compiler failed: SIGKILL")
    assert only_whole_files(cache)
    assert not list(cache.rglob("*.so")) + list(cache.rglob("*.o"))
    build.cpu_library.cache_clear()
    assert build.cpu_library().forty_two() == 42


def test_a_builder_that_is_killed_while_its_compiler_goes_on(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler of the killed builder writes after that of the next one, to the same name."""
    folder = cache.parent
    script = """
        if mkdir first 2>/dev/null; then
            echo half > $out; touch waiting
            while [ ! -e go ]; do sleep .05; done
            (echo other half > $out) 2>/dev/null; touch done
            exit
        fi
        if mkdir second 2>/dev/null; then
            {real} "$@"; code=$?
            touch go
            while [ ! -e done ]; do sleep .05; done
            exit $code
        fi
    """.replace("{real}", str(shutil.which("g++")))
    use_compiler(monkeypatch, folder, script)
    builder = start_builder(cache)
    wait_until((folder / "waiting").exists, timeout_s=120)
    builder.kill()
    assert builder.wait() == -signal.SIGKILL
    builder.communicate()
    assert build.cpu_library().forty_two() == 42
    assert (folder / "done").exists()
    assert only_whole_files(cache)


def test_builders_in_several_processes_with_one_empty_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two servers that start at once: one compiles, and the others say that they wait."""
    script = """
        echo x >> runs
        while [ ! -e go ]; do sleep .05; done
    """
    use_compiler(monkeypatch, cache.parent, script)
    builders = [start_builder(cache) for _ in range(3)]
    waiting = [b.stderr.readline() for b in builders]
    (cache.parent / "go").touch()
    ends = [builder.communicate() for builder in builders]
    assert [(b.returncode, out) for b, (out, _) in zip(builders, ends, strict=True)] == [
        (0, "42\n")
    ] * 3
    lines = sorted(line.split(" ")[1] for line in waiting)
    assert lines == ["building", "waiting", "waiting"]
    assert (cache.parent / "runs").read_text() == "x\nx\n", "one compiled, and linked"
    assert only_whole_files(cache)


def no_digest(finished: Path, path: Path) -> None:
    raise OSError(28, "No space left on device", str(path))


@pytest.mark.parametrize("where", ["compiler", "digest"])
def test_a_full_disk(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    """One line, nothing half-written, and the library that was there is still there."""
    whole = build.build_cpu()
    (build._SOURCES / "answer.cpp").write_text(SOURCE + "\n")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        if where == "digest":
            patch.setattr(compiler, "put", no_digest)
        with largest_file(1024 if where == "compiler" else resource.RLIM_INFINITY):
            assert build.cpu_library() is None
    (record,) = (x for x in caplog.records if x.levelno >= logging.WARNING)
    assert "C++ kernels are off, PyTorch's operators do their work: " in record.message
    assert "\n" not in record.message
    assert only_whole_files(cache)
    assert list(cache.glob("*.so")) == [whole]
    build.cpu_library.cache_clear()
    assert build.cpu_library().forty_two() == 42


@pytest.mark.parametrize("jump_s", [-1e9, 1e9], ids=["back", "forth"])
def test_a_clock_that_jumps_between_and_during_builds(
    cache: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """The age of unused objects is all that is told by the clock on the wall."""
    now = time.time

    def jump() -> float:
        return now() + jump_s

    build.build_cpu()
    monkeypatch.setattr(time, "time", jump)
    (build._SOURCES / "other.cpp").write_text("int other() { return 1; }")
    assert build.cpu_library().forty_two() == 42
    monkeypatch.setattr(time, "time", now)
    (build._SOURCES / "third.cpp").write_text("int third() { return 1; }")
    build.cpu_library.cache_clear()
    assert build.cpu_library().forty_two() == 42
    assert only_whole_files(cache)
