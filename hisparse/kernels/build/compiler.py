"""Runs a compiler once for each library, into a cache that is shared between processes."""

import contextlib
import hashlib
import logging
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from hisparse.kernels.build.cache import is_intact, locked, private_folder, put, unfinished

logger = logging.getLogger(__name__)

# In a checkout hisparse/_csrc is a link to csrc/; a wheel holds the files themselves.
SOURCES = (Path(__file__).resolve().parents[2] / "_csrc").resolve()
# Seconds between lines that say how far a build is.
_PROGRESS_S = 10.0
# What the lines of a compiler hold that say why it failed; a linker says it so.
_REASONS = "error|failed:|cannot "


class CannotBuildError(Exception):
    """A library cannot be built; the message is one line."""


def binding_flags() -> tuple[list[str], list[str]]:
    """Flags of apache-tvm-ffi for compiling, and for linking with a compiler like GCC."""
    from tvm_ffi import libinfo

    library = Path(libinfo.find_libtvm_ffi()).parent
    link = [f"-L{library}", "-ltvm_ffi", f"-Wl,-rpath,{library}"]
    return [f"-I{path}" for path in libinfo.include_paths()], link


def digest_of(files: Iterable[Path], *texts: str) -> str:
    """16 hexadecimal digits that change with the names and bytes of files, and with ``texts``."""
    digest = hashlib.sha256("\n".join(texts).encode())
    for path in sorted(files):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def compile_library(
    prefix: Path,
    what: str,
    command: Sequence[str],
    sources: Iterable[Path],
    headers: Iterable[Path],
    link: Sequence[str],
) -> Path:
    """Compile sources side by side and link them, unless the library is there.

    Args:
        prefix: beginning of the library's path.
        what: the library, for the message.
        command: the compiler and its flags.
        sources: C++ or CUDA files.
        headers: headers that the sources include; the names of all objects change with them.
        link: flags for linking, after the objects.

    Returns:
        the path of the library.

    Raises:
        CannotBuildError: the compiler fails; its first error.
        OSError: a folder cannot be written to.
    """
    headers = set(headers)
    version = subprocess.run([command[0], "--version"], capture_output=True, text=True, check=False)
    machine = _processor() if "-march=native" in command else ""
    # Without the folder of the sources: several checkouts share objects.
    common = digest_of(headers, *command, version.stdout, machine)
    includes = sorted({f"-I{path.parent}" for path in headers})
    compilations = {
        prefix.parent / "objects" / f"{path.stem}-{digest_of([path], common)}.o": [
            *command, *includes, "-c", str(path)
        ]
        for path in sources
    }  # fmt: skip
    linking = [*command, "-shared", *map(str, compilations), *link]
    target = prefix.with_name(f"{prefix.name}-{digest_of([], *linking)}.so")
    produce_from_objects(what, compilations, linking, target)
    return target


def produce_from_objects(
    what: str, compilations: Mapping[Path, list[str]], link: list[str], target: Path
) -> None:
    """Compile objects side by side, then run ``link -o target``, unless the target is there.

    One process does it at a time. Objects in the cache are reused, so only changed sources are
    compiled.

    Args:
        what: the library, for the message.
        compilations: by path of the object, which names its content, the command without ``-o``.
        link: the command without ``-o``.
        target: the library.

    Raises:
        CannotBuildError: the compiler fails; its first error.
        OSError: a folder cannot be written to.
    """

    def compile_one(folder: Path, path: Path, command: list[str]) -> None:
        if is_intact(path):
            path.touch()
            return
        _run(command, folder / path.name)
        put(folder / path.name, path)

    def build(folder: Path) -> None:
        for parent in {path.parent for path in compilations}:
            private_folder(parent)
        said = time.monotonic()
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            compiled = pool.map(partial(compile_one, folder), compilations, compilations.values())
            for done, _ in enumerate(compiled, start=1):
                if time.monotonic() - said > _PROGRESS_S:
                    said = time.monotonic()
                    _say(f"{done} of {len(compilations)} files of {what} compiled")
        _run(link, folder / target.name)
        _remove_old({path.parent for path in compilations})

    _produce(what, target, build)


def _produce(what: str, target: Path, build: Callable[[Path], None]) -> None:
    private_folder(target.parent)
    if is_intact(target):
        return
    with locked(target, lambda: _say(f"waiting for another process that builds {what} ...")):
        if is_intact(target):  # Another process has just built it.
            return
        if target.exists():
            logger.warning("%s is damaged, so it is built again", target)
        _say(f"building {what} into {target.parent} ...")
        start = time.perf_counter()
        with unfinished(target) as folder:
            build(folder)
            put(folder / target.name, target)
        logger.info("built %s in %.1f s", target, time.perf_counter() - start)


def _say(line: str) -> None:
    print(f"hisparse: {line}", file=sys.stderr, flush=True)


def _run(command: list[str], output: Path) -> None:
    result = subprocess.run(
        [*command, "-o", str(output)], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        logger.debug("%s", result.stderr)
        errors = [line for line in result.stderr.splitlines() if re.search(_REASONS, line)]
        code = result.returncode
        end = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        first = errors[0] if errors else end
        raise CannotBuildError(f"{command[0]} failed: {first}")


def _remove_old(folders: Iterable[Path]) -> None:
    """Remove objects that no build has used for a week."""
    oldest = time.time() - 7 * 24 * 3600
    for folder in folders:
        for path in folder.glob("*.o"):
            # Another process may remove it first.
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < oldest:
                    path.unlink()
                    path.with_name(path.name + ".sha256").unlink()


def _processor() -> str:
    """Identifies the processor for ``-march=native``: machines may share a home folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    names = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU part")
    return platform.machine() + "".join(
        sorted({line for line in lines if line.split("\t")[0].strip() in names})
    )
