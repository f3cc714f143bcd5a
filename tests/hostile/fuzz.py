"""Changes the file of a reader again and again, and keeps the changes that reach new code.

``python -m tests.hostile.fuzz READER --seconds N`` runs atheris (``make fuzz-tools`` installs it in
``.venv/fuzz``, which ``PYTHONPATH`` must name); without READER, all in turn. A reader's turn ends
at a finding: an exception that is not the documented error, a refusal that is not one line, or a
configuration that must be refused and is not. The file that shows it is kept in
``build/fuzz/``; ``READER --file FILE`` reads it once more.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib.util
import io
import json
import random
import re
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # What is imported before atheris watches imports has no coverage.
    from tests.hostile.readers import Reader

_FINDINGS = Path("build/fuzz")
_WATCHED = ["hisparse", "hisparse_bench", "scripts"]
_CONFIGURATION = "configuration"


class _Capture(io.StringIO):
    """Standard error, which the readers ask for as they ask pytest's ``capsys``."""

    def readouterr(self) -> SimpleNamespace:
        said = self.getvalue()
        self.seek(0)
        self.truncate()
        return SimpleNamespace(err=said)


def _readers(folder: Path, capture: _Capture) -> dict[str, Reader]:
    """The readers by name, and one of ``--hisparse-config``."""
    from tests.hostile.readers import Reader, readers
    from tests.hostile.test_configurations import check

    command_line = Reader(
        name=_CONFIGURATION,
        content=b"{}",
        read=lambda path: check(path.read_bytes().decode("utf-8", "replace")),
    )
    return {reader.name: reader for reader in (command_line, *readers(folder, capture))}


def read_checked(reader: Reader, path: Path, content: bytes, capture: io.StringIO) -> None:
    """Read a file.

    Raises:
        Exception: a finding.
    """
    path.write_bytes(content)
    with contextlib.redirect_stderr(capture), contextlib.redirect_stdout(io.StringIO()):
        line = reader.line_for(path)
    assert line is None or ("\n" not in line and len(line) < 1_500), line


def changed(rng: random.Random, data: bytes, mutate: Callable[[bytes], bytes]) -> bytes:
    """A file with changed bytes or JSON; those of a gzip are often changed inside."""
    from tests.hostile.mutations import damaged, mutated_object, mutated_text

    way = rng.randrange(4)
    # Not JSON, nested too deep, or a damaged gzip.
    with contextlib.suppress(ValueError, RecursionError, OSError, EOFError, zlib.error):
        if way > 1 and data.startswith(b"\x1f\x8b"):
            first, rest = gzip.decompress(data).split(b"\n", 1)
            if way == 2:
                first = json.dumps(mutated_object(rng, json.loads(first))).encode()
            else:
                rest = damaged(rng, rest)
            return gzip.compress(first + b"\n" + rest, 1)
        if way == 3:
            lines = data.splitlines() or [b""]
            chosen = rng.randrange(len(lines))
            lines[chosen] = json.dumps(mutated_object(rng, json.loads(lines[chosen]))).encode()
            return b"\n".join(lines) + b"\n"
    if way >= 2:
        text = data.decode("utf-8", "surrogateescape")
        return mutated_text(rng, text).encode("utf-8", "surrogatepass")
    return damaged(rng, data) if way == 1 and data else mutate(data)


def _fuzz(name: str, seconds: int, folder: Path) -> None:
    """Fuzz one reader; atheris ends the process."""
    import atheris

    capture, path, seeds = _Capture(), folder / "given" / "records.jsonl", folder / "seeds"
    path.parent.mkdir()
    seeds.mkdir()
    with atheris.instrument_imports(include=_WATCHED):
        from tests.hostile.test_configurations import configuration

        reader = _readers(folder, capture)[name]
        # The first reading imports the rest.
        read_checked(reader, path, reader.content, capture)
    (seeds / "accepted").write_bytes(reader.content)
    for seed in range(200 if name == _CONFIGURATION else 0):
        text = configuration(random.Random(seed))
        (seeds / str(seed)).write_bytes(text.encode("utf-8", "replace"))
    most = max(4096, 2 * len(reader.content))

    def change(data: bytes, size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        return changed(rng, data, lambda data: bytes(atheris.Mutate(data, size)))[:size]

    arguments = [f"-max_total_time={seconds}", f"-max_len={most}", "-rss_limit_mb=8192"]
    arguments.append(f"-artifact_prefix={_FINDINGS.resolve()}/{name.replace(' ', '_')}-")
    atheris.Setup(
        ["fuzz", str(seeds), *arguments],
        lambda data: read_checked(reader, path, data, capture),
        custom_mutator=change,
    )
    atheris.Fuzz()


def _report(name: str, seconds: int) -> bool:
    """Fuzz one reader in a process of its own and print a line. Returns False for a finding."""
    code = f"from tests.hostile import fuzz; fuzz._fuzz({name!r}, {seconds}, fuzz.Path({{!r}}))"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code.format(folder)]
        ran = subprocess.run(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE)
    said = ran.stdout.decode("utf-8", "replace")
    done = re.search(r"^#(\d+)\s+DONE\s+cov: (\d+)", said, re.MULTILINE)
    if ran.returncode or not done:
        print(re.sub(r"^INFO: Instrumenting .*\n", "", said, flags=re.MULTILINE))
        print(f"{name}: a finding; a file that shows it is in {_FINDINGS}/")
        return False
    print(f"{name}: {done[1]} files, {done[2]} branches reached, nothing found", flush=True)
    return True


def main() -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="fuzz", description="Fuzz readers of files")
    parser.add_argument("reader", nargs="?", help="its name; default: all, one after the other")
    parser.add_argument("--seconds", type=int, default=60, help="for each reader")
    parser.add_argument("--file", type=Path, help="read this file once, without atheris")
    arguments = parser.parse_args()
    capture = _Capture()
    with tempfile.TemporaryDirectory() as folder:
        readers = _readers(Path(folder), capture)
        names = list(readers)
        if arguments.reader not in (None, *names):
            parser.error(f"got {arguments.reader!r}, expected one of: {', '.join(names)}")
        if arguments.file and not arguments.reader:
            parser.error("--file: got no READER to read it")
        if arguments.file:
            path = Path(folder) / "records.jsonl"
            content = arguments.file.read_bytes()
            read_checked(readers[arguments.reader], path, content, capture)
            return 0
    if not importlib.util.find_spec("atheris"):
        print("fuzz: left out: atheris is not installed (make fuzz-tools)")
        return 0
    _FINDINGS.mkdir(parents=True, exist_ok=True)
    chosen = [arguments.reader] if arguments.reader else names
    return int(not all([_report(name, arguments.seconds) for name in chosen]))


if __name__ == "__main__":
    sys.exit(main())
