"""Records what the tests of kernels call, and calls it again in other builds of the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hisparse.kernels.build.compiler import CannotBuildError
from tests.kernels.isa.builds import Build
from tests.kernels.isa.compare import difference
from tests.kernels.isa.recorder import Recorded, Recorder, kernel_names

__all__ = ["Failed", "rerun_tests"]

_TESTS = Path(__file__).parents[1]


class Failed(Exception):
    """One line that says why."""


def rerun_tests(part: str, builds: Sequence[Build], install: Callable[[], None]) -> int:
    """Print a table of calls and a line for each difference.

    Args:
        part: of ``make test-all``, for messages.
        builds: in which the calls run again.
        install: installs tools that the builds need.

    Returns:
        0 if there is no difference, else 1.
    """
    try:
        install()
        recorded = record()
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            libraries = list(threads.map(Build.kernels, builds))
            list(threads.map(Build.program, builds))
        lines = []
        same: Counter[tuple[str, str]] = Counter()
        for build, library in zip(builds, libraries, strict=True):
            lines += compare(build, library, recorded, same)
        print_table(builds, same)
    except (CannotBuildError, Failed, subprocess.CalledProcessError) as error:
        lines = [str(error)]
    for line in lines:
        print(f"{part}: error: {line}", file=sys.stderr)
    return 1 if lines else 0


def record() -> list[Recorded]:
    """Run the tests of kernels, and record what they call."""
    recorder = Recorder()
    # Tests that build libraries have kernels of their own; Triton's tests call none.
    left_out = ("test_build", "test_triton")
    files = [
        path for path in sorted(_TESTS.glob("test_*.py")) if not path.stem.startswith(left_out)
    ]
    options = ["--quiet", "--hypothesis-seed=0", "--durations=0", "--durations-min=60"]
    with recorder.recording():
        code = pytest.main([*options, *map(str, files)], plugins=[recorder])
    if code != 0:
        raise Failed("the tests that are recorded fail")
    names = {record.call.name for record in recorder.recorded}
    if missing := [name for name in kernel_names() if name not in names]:
        raise Failed(f"no test calls {', '.join(missing)}")
    return recorder.recorded


def compare(
    build: Build, kernels: Path, recorded: list[Recorded], same: Counter[tuple[str, str]]
) -> Iterator[str]:
    """Rerun all calls in a build; a line for each that differs, and counts of those that do not."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = build.rerun([record.call for record in recorded], kernels, Path(folder))
        except RuntimeError as error:
            yield f"{build.name}: {error}"
            return
    for (test, call, expected), got in zip(recorded * build.callers, results, strict=True):
        if not build.float16 and "got 16-bit elements" in got.outcome:
            continue
        if line := difference(call, expected, got):
            yield f"{build.name}: {call.name}, called by {test}: {line}"
        else:
            same[call.name, build.name] += 1


def print_table(builds: Sequence[Build], same: Counter[tuple[str, str]]) -> None:
    """Calls that gave in each build what they gave in the tests."""
    width = max(8, 2 + max(len(build.name) for build in builds))
    print(f"{'calls of':<20}" + "".join(f"{build.name:>{width}}" for build in builds))
    for kernel in kernel_names():
        counts = (same[kernel, build.name] for build in builds)
        print(f"{kernel:<20}" + "".join(f"{count:>{width}}" for count in counts))
