"""Builds the real CUDA sources with the C++ compiler, against headers that run them as fibers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hisparse.kernels.build.cache import CACHE
from hisparse.kernels.build.compiler import SOURCES, binding_flags, digest_of, produce_from_objects
from hisparse.kernels.build.cpu import cxx_compiler

HEADERS = Path(__file__).parent
FLAGS = [
    *("-std=c++17", "-fPIC", "-shared", "-Wall", "-Werror"),
    # Pragmas of nvcc; bytes are read as whatever the unit of a copy is; fibers change stacks.
    *("-Wno-unknown-pragmas", "-Wno-array-bounds", "-Wno-maybe-uninitialized"),
    *("-fno-strict-aliasing", "-U_FORTIFY_SOURCE"),
    # Libraries of several versions of the sources are loaded side by side and must not meet.
    *("-fno-gnu-unique", "-fvisibility=hidden"),
]
#: Calls a function of races.cpp at each access, and lets addresses be found in the sources. The
#: fences that GCC warns of are the binding's, on the host.
RECORDED = ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "-Wno-tsan", "-g1"]


@functools.cache
def fiber_library() -> Any:
    """The library of the sources as they are."""
    return load(SOURCES, CACHE, "-O2")


def load(sources: Path, cache: Path, optimization: str = "-O0") -> Any:
    """The library of a ``csrc`` folder, built into the cache if need be.

    What a few calls want is not worth optimizing: to compile takes a third of the time.
    """
    import tvm_ffi

    includes = [f"-I{folder}" for folder in (HEADERS, sources, sources / "include")]
    parts = [*sources.glob("*.h"), *sources.glob("include/hisparse/*.*h")]
    parts += [*HEADERS.glob("*.h"), *HEADERS.glob("hisparse/*.cuh")]
    headers, link = binding_flags()
    command = [cxx_compiler(), *FLAGS, optimization, *includes, *headers, "-x", "c++", "-c"]
    objects = {}
    # The linker takes the first of several copies of an inline function: a recorded one.
    for file in (*sorted(sources.glob("*.cu")), *sorted(HEADERS.glob("*.cpp"))):
        own = [*command, *(RECORDED if file.suffix == ".cu" else []), str(file)]
        objects[cache / "objects" / f"fibers-{digest_of([*parts, file], *own)}.o"] = own
    target = cache / f"fibers-{digest_of([], *link, *map(str, objects))}.so"
    linker = [cxx_compiler(), "-shared", *map(str, objects), *link]
    produce_from_objects("CUDA kernels for fibers", objects, linker, target)
    return tvm_ffi.load_module(str(target))


def spoiled(folder: Path, changes: Mapping[str, Sequence[tuple[str, str]]]) -> Path:
    """A copy of the sources of LRU bookkeeping; by file name, texts to replace that stand there
    once, and what replaces them.
    """
    files = [SOURCES / name for name in ("diff_tables.cu", "row_state.cu")]
    for path in [*files, *SOURCES.glob("*.h"), *SOURCES.glob("include/*/*.*h")]:
        text = path.read_text()
        for old, new in changes.get(path.name, ()):
            assert text.count(old) == 1, f"{path.name}: {text.count(old)} times {old!r}"
            text = text.replace(old, new)
        target = folder / path.relative_to(SOURCES)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return folder
