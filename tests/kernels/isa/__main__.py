"""``make test-all PART=isa``: what the tests of kernels call on this processor, called again in
builds of the kernels for other instruction sets.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hisparse.kernels.build.compiler import CannotBuildError
from tests.kernels.isa.builds import ARM_TOOLS, BUILDS, Build
from tests.kernels.isa.compare import difference
from tests.kernels.isa.recorder import Recorded, Recorder, kernel_names

_TESTS = Path(__file__).parents[1]


class Failed(Exception):
    """One line that says why."""


def main() -> int:
    """Print a table of calls and a line for each difference; 0 if there is none."""
    try:
        install_tools()
        recorded = record()
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            libraries = list(threads.map(Build.kernels, BUILDS))
            list(threads.map(Build.program, BUILDS))
        lines = []
        same: Counter[tuple[str, str]] = Counter()
        for build, library in zip(BUILDS, libraries, strict=True):
            lines += compare(build, library, recorded, same)
        print_table(same)
    except (CannotBuildError, Failed, subprocess.CalledProcessError) as error:
        lines = [str(error)]
    for line in lines:
        print(f"isa: error: {line}", file=sys.stderr)
    return 1 if lines else 0


def install_tools() -> None:
    """Install the compiler and the emulator for ARM if this user may."""
    missing = [name for name in ARM_TOOLS if not shutil.which(name)]
    if not missing:
        return
    install = ["apt-get", "install", "-y", *(ARM_TOOLS[name] for name in missing)]
    said = f"{' and '.join(missing)} missing; on Debian: {' '.join(install)}"
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise Failed(said)
    print(f"isa: {' '.join(install)}")
    for command in (["apt-get", "update"], install):
        if subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode != 0:
            raise Failed(said)


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
    build: Build, kernels: Path, recorded: Sequence[Recorded], same: Counter[tuple[str, str]]
) -> Iterator[str]:
    """Rerun all calls in a build; a line for each that differs, and counts of those that do not."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = build.rerun([record.call for record in recorded], kernels, Path(folder))
        except RuntimeError as error:
            yield f"{build.name}: {error}"
            return
    for (test, call, expected), got in zip(recorded, results, strict=True):
        if not build.float16 and "got 16-bit elements" in got.outcome:
            continue
        if line := difference(call, expected, got):
            yield f"{build.name}: {call.name}, called by {test}: {line}"
        else:
            same[call.name, build.name] += 1


def print_table(same: Counter[tuple[str, str]]) -> None:
    """Calls that gave in each build what they gave in the tests."""
    print(f"{'calls of':<20}" + "".join(f"{build.name:>8}" for build in BUILDS))
    for kernel in kernel_names():
        print(f"{kernel:<20}" + "".join(f"{same[kernel, build.name]:>8}" for build in BUILDS))


if __name__ == "__main__":
    sys.exit(main())
