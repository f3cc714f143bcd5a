"""Writes the hashes of all pins of a requirements file into it.

``python -m scripts.pin_hashes requirements/cpu.txt`` keeps comments and versions, and replaces the
hashes by those of the files that the package index has: source archives, and wheels for Linux on
x86-64 and ARM and for the Python releases in ``PYTHONS``. It needs ``uv`` (the extra ``release``).
Change a version in the file, then run it: pip refuses a file whose hash is not listed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from packaging.tags import Tag
from packaging.utils import canonicalize_name, parse_wheel_filename

#: Minor releases of Python 3 that `scripts/setup.sh` takes.
PYTHONS = (11, 12, 13, 14)


def _serves(tag: Tag) -> bool:
    """Whether a wheel with this tag may be installed by the set-up."""
    linux = "linux" in tag.platform and tag.platform.endswith(("x86_64", "aarch64"))
    if tag.platform != "any" and (not linux or tag.platform.startswith("musl")):
        return False
    if tag.interpreter.startswith("py"):
        return tag.interpreter.startswith("py3")
    minor = re.fullmatch(r"cp3(\d+)", tag.interpreter)
    if minor is None:
        return False
    if tag.abi == "abi3":
        return int(minor[1]) <= PYTHONS[-1]
    return int(minor[1]) in PYTHONS and tag.abi in (tag.interpreter, "none")


def _hashes(package: dict[str, Any]) -> list[str]:
    """Hashes of a package's files, as an entry of a ``pylock.toml`` lists them."""
    files = [package["sdist"]] if "sdist" in package else []
    for wheel in package.get("wheels", ()):
        _, _, _, tags = parse_wheel_filename(wheel["url"].rpartition("/")[2].replace("%2B", "+"))
        if any(map(_serves, tags)):
            files.append(wheel)
    return sorted(file["hashes"]["sha256"] for file in files)


def _lock(pins: list[str]) -> dict[str, list[str]]:
    """Hashes by name of package."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-deps", "--universal"]
    command += ["--python-version", f"3.{PYTHONS[0]}", "--format", "pylock.toml", "-"]
    done = subprocess.run(command, input="\n".join(pins), text=True, stdout=subprocess.PIPE)
    if done.returncode != 0:
        raise SystemExit("pin_hashes: error: uv failed; `pip install 'hisparse[release]'` has it")
    lock = tomllib.loads(done.stdout)
    return {canonicalize_name(p["name"]): _hashes(p) for p in lock["packages"]}


def main(path: Path) -> None:
    """Rewrite one requirements file in place."""
    lines = [x for x in path.read_text().splitlines() if not x.startswith("    --hash=")]
    lines = [line.removesuffix(" \\") for line in lines]
    hashes = _lock([line for line in lines if line and not line.startswith("#")])
    out = []
    for line in lines:
        found = hashes.get(canonicalize_name(line.partition("==")[0]), [])
        if line and not line.startswith("#") and not found:
            raise SystemExit(f"pin_hashes: error: {line}: the index has no file for this set-up")
        out.append(" \\\n".join([line, *(f"    --hash=sha256:{digest}" for digest in found)]))
    path.write_text("\n".join(out) + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("pin_hashes: error: got no file, expected requirements/*.txt to rewrite")
    for name in sys.argv[1:]:
        main(Path(name))
