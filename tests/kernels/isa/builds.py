"""The CPU kernels and ``rerun.cpp``, compiled for several instruction sets."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from hisparse.kernels.build import cpu as _build
from hisparse.kernels.build.cache import CACHE
from hisparse.kernels.build.compiler import SOURCES, binding_flags, digest_of, produce_from_objects
from tests.kernels.isa.calls import Call, Result, read_results, write_calls

__all__ = ["ARM_TOOLS", "BUILDS", "NATIVE", "PARALLEL", "Build", "what_stopped"]

_RERUN = Path(__file__).with_name("rerun.cpp")
PARALLEL = SOURCES / "cpu" / "parallel.cpp"
# GCC 12 warns of its own header of AVX-512, and of vectors that only inlined functions return.
_WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-maybe-uninitialized", "-Wno-psabi")
#: By program, the package of Debian that has it.
ARM_TOOLS = {"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user"}
_QEMU = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")


@dataclass(frozen=True)
class Build:
    """How the kernels are compiled and run.

    Attributes:
        name: of the instruction set.
        march: the compiler's ``-march``.
        emulator: command in front of a program for ARM; empty for a program for x86.
        float16: the kernels read float16; on x86 this needs F16C.
        flags: more flags of the compiler, for the kernels and for ``rerun.cpp``.
        parallel: takes the place of ``csrc/cpu/parallel.cpp``.
        environment: more variables for the program that reruns.
        callers: threads that each rerun all calls, at the same time.
    """

    name: str
    march: str
    emulator: tuple[str, ...] = ()
    float16: bool = True
    flags: tuple[str, ...] = ()
    parallel: Path = PARALLEL
    environment: Mapping[str, str] = field(default_factory=dict)
    callers: int = 1

    def kernels(self) -> Path:
        """Compile the kernels unless the cache has them.

        Raises:
            CannotBuildError: the compiler fails or warns; its first error.
        """
        sources, headers = _build.cpu_sources()
        sources = [x if x != PARALLEL else self.parallel for x in sources]
        command, link = self._compiler(_build._FLAGS)
        prefix, what = CACHE / f"kernels-{self.name}", f"kernels for {self.name}"
        return _build.compile_library(prefix, what, command, sources, headers, link)

    def program(self) -> Path:
        """Compile ``rerun.cpp`` unless the cache has it; raises as ``kernels``."""
        return self.compiled([_RERUN])

    def compiled(self, sources: Sequence[Path]) -> Path:
        """Compile a program unless the cache has it; raises as ``kernels``."""
        command, link = self._compiler(["-std=c++17", "-O1", "-fopenmp"])
        command += [f"-I{SOURCES / 'cpu'}", *map(str, sources), *link]
        name = sources[0].stem
        path = CACHE / f"{name}-{self.name}-{digest_of(sources, *command)}.so"
        produce_from_objects(f"{name} for {self.name}", {}, command, path)
        return path

    def rerun(self, calls: Sequence[Call], kernels: Path, folder: Path) -> list[Result]:
        """The results of calls.

        Args:
            calls: what to rerun.
            kernels: the library that has them.
            folder: for files.

        Raises:
            RuntimeError: a call stopped the program, or a result is missing; one line. A
                sanitizer's report goes to standard error.
        """
        write_calls(calls, folder / "calls")
        outputs = [folder / f"results{i}" for i in range(self.callers)]
        command = [*self.emulator, str(self.program()), str(kernels), str(folder / "calls")]
        ended = subprocess.run(
            [*command, *map(str, outputs)],
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode != 0:
            raise RuntimeError(f"exit code {ended.returncode} at {what_stopped(ended.stderr)}")
        results = [result for path in outputs for result in read_results(calls, path)]
        if len(results) < len(calls) * self.callers:
            raise RuntimeError(f"got {len(results)} results, expected {len(calls) * self.callers}")
        return results

    def _compiler(self, flags: Sequence[str]) -> tuple[list[str], list[str]]:
        """The compiler with ``flags`` and those of the build, and flags for linking."""
        compiler = next(iter(ARM_TOOLS)) if self.emulator else _build.cxx_compiler()
        includes, link = _arm_binding_flags() if self.emulator else binding_flags()
        # Warnings of the binding's headers are not ours.
        includes = [flag.replace("-I", "-isystem", 1) for flag in includes]
        command = [compiler, *flags, f"-march={self.march}", *includes, *_WARNINGS, *self.flags]
        return command, [*link, *self.flags]


NATIVE = Build("native", "native")
BUILDS = (
    Build("sse", "x86-64-v2", float16=False),
    Build("avx2", "x86-64-v3"),
    NATIVE,
    Build("neon", "armv8-a", _QEMU),
    # What "native" means on a Grace host, whose vectors have 16 bytes.
    Build("sve", "armv8.6-a+sve2", (*_QEMU, "-cpu", "max,sve-default-vector-length=16")),
)


def what_stopped(told: str) -> str:
    """The last call that began, and a sanitizer's summary; prints the sanitizer's report."""
    lines = told.splitlines()
    calls = [line for line in lines if line.startswith(("call", "rerun"))] or ["the start"]
    report = [line for line in lines if line not in calls]
    print(*report, sep="\n", file=sys.stderr)
    summaries = [line for line in report if line.startswith("SUMMARY: ")]
    return "; ".join([calls[-1], *summaries[:1]])


@functools.cache
def _arm_binding_flags() -> tuple[list[str], list[str]]:
    """As ``binding_flags``, for the same version of apache-tvm-ffi on ARM."""
    release = version("apache-tvm-ffi")
    folder = Path(sys.prefix) / f"tvm-ffi-aarch64-{release}"
    package = folder / "tvm_ffi"
    if not package.is_dir():
        wheel = ["--platform", "manylinux_2_28_aarch64", "--only-binary=:all:", "--no-deps"]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        subprocess.run([*command, *wheel, f"apache-tvm-ffi=={release}"], check=True)
    library = package / "lib"
    headers = [package / "include", package / "3rdparty/dlpack/include"]
    link = [f"-L{library}", "-ltvm_ffi", f"-Wl,-rpath,{library}"]
    return [f"-I{path}" for path in headers], link
