"""Runs a compiler once for each library, into a cache that is shared between processes."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["CACHE", "SOURCES", "CannotBuildError", "binding_flags", "digest_of", "produce"]

logger = logging.getLogger(__name__)

# In a checkout hisparse/_csrc is a link to csrc/; a wheel holds the files themselves.
SOURCES = (Path(__file__).resolve().parents[2] / "_csrc").resolve()
CACHE = Path.home() / ".cache" / "hisparse" / "kernels"


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


def produce(what: str, command: list[str], target: Path) -> None:
    """Run ``command -o target`` unless the target is there; one process at a time.

    Raises:
        CannotBuildError: the compiler fails; its first error.
        OSError: the folder cannot be written to.
    """
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():  # Another process has just built it.
            return
        print(f"hisparse: building {what} into {target.parent} ...", file=sys.stderr)
        start = time.perf_counter()
        # Never a half-written library under the final name.
        partial = target.with_suffix(".partial.so")
        result = subprocess.run(
            [*command, "-o", str(partial)], capture_output=True, text=True, check=False
        )
        if result.returncode != 0:
            logger.debug("%s", result.stderr)
            errors = [line for line in result.stderr.splitlines() if "error" in line]
            first = errors[0] if errors else f"exit code {result.returncode}"
            raise CannotBuildError(f"{command[0]} failed: {first}")
        partial.replace(target)
        logger.info("built %s in %.1f s", target, time.perf_counter() - start)
