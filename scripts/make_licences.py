"""Write docs/licences.md: the licence of each package that hisparse needs when it runs.

Run as ``python -m scripts.make_licences docs/licences.md`` in the CPU set-up. Names come from
pyproject.toml and the requirements of installed packages, licences from their metadata.
"""

from __future__ import annotations

import sys
import tomllib
from collections import defaultdict
from importlib.metadata import PackageMetadata, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent

#: Extras with packages that hisparse imports when it runs.
EXTRAS = ("eval", "bench", "kvcm", "sglang")

_INTRO = """\
# Licences

After this page you know the licence of each package that hisparse needs when it runs, as the
package's own metadata states it. hisparse itself is under Apache-2.0 and contains no code of these
packages. `make licences` generates the page from the CPU set-up; do not edit it. A set-up for CUDA
brings further packages, among them NVIDIA's libraries, which have a licence of their own.
"""


def _licence(metadata: PackageMetadata) -> str:
    """What the metadata states, in the newest form that it has."""
    text = metadata.get("License-Expression") or metadata.get("License") or ""
    classifiers = [x for x in metadata.get_all("Classifier", []) if x.startswith("License :: ")]
    if classifiers and ("\n" in text or text in ("", "UNKNOWN")):
        text = ", ".join(x.rpartition(" :: ")[2] for x in classifiers)
    text = text.strip().partition("\n")[0]
    return text if text not in ("", "UNKNOWN") else "see the package"


def _reachable(names: list[str]) -> set[str]:
    """Installed packages that these need, directly or not, themselves included."""
    found: set[str] = set()
    waiting = [canonicalize_name(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            requirements = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        found.add(name)
        for requirement in map(Requirement, requirements):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(canonicalize_name(requirement.name))
    return found


def _pinned() -> set[str]:
    """Packages of the CPU set-up: others may be installed too."""
    lines = [
        line
        for name in ("cpu.txt", "constraints.txt", "sglang.txt")
        for line in (ROOT / "requirements" / name).read_text().splitlines()
    ]
    return {canonicalize_name(x.partition("==")[0]) for x in lines if "==" in x and x[0] != "#"}


def make_licences() -> str:
    """The whole page, as Markdown."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"hisparse": project["dependencies"]}
    groups |= {f"extra `{name}`": project["optional-dependencies"][name] for name in EXTRAS}
    needed_by: dict[str, str] = {}
    for group, requirements in groups.items():
        for name in _reachable([Requirement(text).name for text in requirements]) & _pinned():
            needed_by.setdefault(name, group)
    packages: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in sorted(needed_by):
        packages[needed_by[name], _licence(distribution(name).metadata)].append(name)
    lines = [_INTRO]
    for group in groups:
        found = sorted(item for item in packages.items() if item[0][0] == group)
        lines += [f"## For {group}", ""]
        lines += [f"- {licence}: {', '.join(names)}" for (_, licence), names in found]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(make_licences(), encoding="utf-8")
