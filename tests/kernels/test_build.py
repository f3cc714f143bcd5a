"""Building the C++ kernels: once, under a key of all that matters, and never in the way."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import torch

from hisparse.errors import KernelError
from hisparse.kernels.build import compiler as _compiler
from hisparse.kernels.build import cpu as _build
from hisparse.kernels.build.cache import is_intact
from hisparse.kernels.operation import OPERATIONS, Place
from tests.kernels.conftest import SOURCE
from tests.kernels.world import World

DIFF_TABLES, ON_CPU = OPERATIONS["diff_tables"], Place("cpu", "cpu")


def test_a_library_is_built_once_and_says_so(
    sources: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _build.cpu_library().forty_two() == 42
    first = _build.build_cpu()
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "building CPU kernels" in said.err
    modified = first.stat().st_mtime_ns
    assert _build.build_cpu() == first
    assert first.stat().st_mtime_ns == modified
    assert capsys.readouterr().err == ""


def test_the_key_follows_sources_flags_and_compiler(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {_build.build_cpu().name}
    (sources / "answer.cpp").write_text(SOURCE + "\n")
    keys.add(_build.build_cpu().name)
    (sources / "answer.h").write_text("")
    keys.add(_build.build_cpu().name)
    monkeypatch.setattr(_build, "_FLAGS", [*_build._FLAGS, "-DHISPARSE_OTHER_FLAG"])
    keys.add(_build.build_cpu().name)
    monkeypatch.setattr(_compiler, "_processor", lambda: "another one")
    keys.add(_build.build_cpu().name)
    assert len(keys) == 5


def outputs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that the compiler is told to write from here on."""
    names, run = list[str](), subprocess.run

    def spy(command: list[str], **kwargs: object) -> object:
        if "-o" in command:
            names.append(Path(command[-1]).name)
        return run(command, **kwargs)

    monkeypatch.setattr(subprocess, "run", spy)
    return names


def test_builders_at_the_same_time_build_once(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = outputs(monkeypatch)
    with ThreadPoolExecutor(3) as pool:
        paths = {f.result() for f in [pool.submit(_build.build_cpu) for _ in range(3)]}
    assert (len(paths), len(written)) == (1, 2)


def test_a_source_that_changes_is_compiled_alone(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (sources / "other.cpp").write_text("int other() { return 1; }")
    _build.build_cpu()
    written = outputs(monkeypatch)
    (sources / "other.cpp").write_text("int other() { return 2; }")
    library = _build.build_cpu()
    assert [name.split("-")[0] for name in written[:-1]] == ["other"]
    (sources / "shared.h").write_text("")
    assert _build.build_cpu() != library
    assert len(written) == 2 + 3


def test_objects_that_no_build_uses_are_removed(sources: Path) -> None:
    _build.build_cpu()
    folder = sources.parent / "cache" / "objects"
    (old,) = folder.glob("*.o")
    os.utime(old, (0, 0))
    (sources / "answer.cpp").write_text(SOURCE + "\n")
    _build.build_cpu()
    (new,) = folder.glob("*.o")
    assert new != old
    # One that is used again is new again.
    os.utime(new, (0, 0))
    (sources / "other.cpp").write_text("")
    _build.build_cpu()
    assert new in folder.iterdir()


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        lambda path: path.write_bytes(b"no library"),
        lambda path: path.write_bytes(path.read_bytes()[:4096]),
        lambda path: path.write_bytes(b""),
        lambda path: path.with_name(path.name + ".sha256").write_text("no digest"),
        lambda path: path.with_name(path.name + ".sha256").unlink(),
    ],
    ids=["bit", "garbage", "truncated", "empty", "digest", "no-digest"],
)
def test_a_damaged_library_is_built_again(
    sources: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    """To load it could end the process, or run something else."""
    library = _build.build_cpu()
    whole = library.read_bytes()
    (item,) = (sources.parent / "cache" / "objects").glob("*.o")
    damage(library)
    damage(item)
    with caplog.at_level(logging.WARNING):
        assert _build.cpu_library().forty_two() == 42
    warnings = [x.message for x in caplog.records if x.levelno >= logging.WARNING]
    assert warnings == [f"{library} is damaged, so it is built again"]
    assert library.read_bytes() == whole


def refusal(caplog: pytest.LogCaptureFixture) -> str:
    """The one line of a library that is not loaded."""
    _build.cpu_library.cache_clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert _build.cpu_library() is None
    (record,) = caplog.records
    assert "\n" not in record.message
    return record.message


def test_the_cache_is_for_this_user_alone(
    sources: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = sources.parent / "cache"
    cache.mkdir(mode=0o755)
    _build.build_cpu()
    assert {path.stat().st_mode & 0o777 for path in (cache, cache / "objects")} == {0o700}
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert f"{cache} belongs to another user (uid {uid}); expected your own" in refusal(caplog)


def test_libraries_that_others_may_have_put_there_are_not_loaded(
    sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With fitting digests, which others may write as well."""
    cache = _build.build_cpu().parent
    for mode in (0o775, 0o707, 0o1777):
        cache.chmod(mode)
        message = refusal(caplog)
        assert f"{cache} can be written to by others (mode {mode:o})" in message
        assert "expected mode 700: remove it" in message
    shutil.rmtree(cache)
    _build.cpu_library.cache_clear()
    assert _build.cpu_library().forty_two() == 42


@pytest.mark.parametrize("suffix", ["", ".sha256"], ids=["library", "digest"])
def test_links_in_the_cache_are_not_followed(sources: Path, suffix: str) -> None:
    """What they lead to may change after it was checked."""
    library = _build.build_cpu()
    path = library.with_name(library.name + suffix)
    target = path.replace(sources.parent / f"elsewhere{suffix}")
    path.symlink_to(target)
    assert not is_intact(library)
    assert _build.cpu_library().forty_two() == 42
    assert not path.is_symlink(), "built again"
    assert target.exists()


def test_a_lock_that_leads_elsewhere_is_not_opened(
    sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = _build.build_cpu()
    library.unlink()
    lock, precious = library.with_suffix(".lock"), sources.parent / "precious"
    precious.write_text("text")
    lock.unlink()
    lock.symlink_to(precious)
    assert str(lock) in refusal(caplog)
    assert precious.read_text() == "text"


def test_a_library_that_is_not_this_user_s_file_is_not_intact(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, uid = _build.build_cpu(), os.geteuid()
    assert is_intact(library)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: uid + 1)
        assert not is_intact(library)
    library.unlink()
    os.mkfifo(library)
    assert not is_intact(library), "nor waited for, if it is a pipe"


def test_a_long_build_says_how_far_it_is(
    sources: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_compiler, "_PROGRESS_S", -1.0)
    (sources / "other.cpp").write_text("int other() { return 1; }")
    _build.build_cpu()
    assert "hisparse: 1 of 2 files of CPU kernels compiled\n" in capsys.readouterr().err


def break_the_source(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sources / "answer.cpp").write_text("this is no C++")


def hide_compilers(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(sources))
    monkeypatch.delenv("CXX", raising=False)


def name_no_compiler(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")


def lose_the_sources(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sources / "answer.cpp").unlink()


def lose_the_binding(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)


def forbid_the_cache(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sources.parent / "cache").write_text("a file where a folder is wanted")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (break_the_source, "failed: .*error"),
        (hide_compilers, r"no C\+\+ compiler found, expected one of g\+\+, c\+\+, clang\+\+"),
        (name_no_compiler, r"no C\+\+ compiler found, expected one of no-such-compiler"),
        (lose_the_sources, "no sources in"),
        (lose_the_binding, "tvm_ffi"),
        (forbid_the_cache, "File exists"),
    ],
    ids=["bad-source", "no-compiler", "bad-CXX", "no-sources", "no-tvm-ffi", "no-cache"],
)
def test_without_a_library_all_works_and_it_is_said_once(
    sources: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    why: str,
) -> None:
    spoil(sources, monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert DIFF_TABLES.implementation("auto", ON_CPU) is DIFF_TABLES.function("reference")
        world = World(2, 4, Random(0), "auto")
        world.resize([0, 1], [4, 3])
        for _ in range(3):
            world.step(0, 9, padded=0, shared=1)
        world.check()
    (record,) = caplog.records
    assert re.search(f"C\\+\\+ kernels are off, .*{why}", record.message)
    with pytest.raises(KernelError, match="implementation 'cpu': the library cannot be built"):
        DIFF_TABLES.implementation("cpu", ON_CPU)


def test_tensors_elsewhere_go_to_the_reference() -> None:
    where = Place.of([torch.zeros(1), torch.zeros(1, device="meta")])
    assert DIFF_TABLES.implementation("auto", where) is DIFF_TABLES.function("reference")
    with pytest.raises(KernelError, match="implementation 'cpu': tensors are on cpu, meta"):
        DIFF_TABLES.implementation("cpu", where)
