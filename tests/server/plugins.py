"""Writes small packages that a server loads by entry point, as if they were installed."""

from __future__ import annotations

import textwrap
from pathlib import Path

__all__ = ["make_dummy_runs", "make_plugin"]


def make_plugin(folder: Path, name: str, group: str, entry: str, source: str) -> Path:
    """A module ``name`` with a ``dist-info`` beside it; the folder goes on PYTHONPATH.

    Args:
        folder: made if it is not there.
        name: module and distribution.
        group: entry point group.
        entry: entry point, such as ``"fixed = my_module:Fixed"``.
        source: of the module.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(textwrap.dedent(source))
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    return folder


def make_dummy_runs(folder: Path) -> Path:
    """``dummy_runs.py`` as a plugin of SGLang's."""
    source = (Path(__file__).parent / "dummy_runs.py").read_text()
    entry = "dummy-runs = dummy_runs_plugin:load"
    return make_plugin(folder, "dummy_runs_plugin", "sglang.srt.plugins", entry, source)
