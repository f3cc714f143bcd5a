"""Writes small packages that a server loads by entry point, as if they were installed."""

from __future__ import annotations

import textwrap
from pathlib import Path


def make_plugin(
    folder: Path, target: str, source: str, *, group: str = "sglang.srt.plugins"
) -> Path:
    """A module with a ``dist-info`` beside it; the folder goes on PYTHONPATH.

    Args:
        folder: made if it is not there.
        target: of the entry point, such as ``"my_module:load"``; its name is that of the module.
        source: of the module.
        group: entry point group.
    """
    name = target.partition(":")[0]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(textwrap.dedent(source))
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")
    return folder


def make_dummy_runs(folder: Path) -> Path:
    """``dummy_runs.py`` as a plugin of SGLang's."""
    source = (Path(__file__).parent / "dummy_runs.py").read_text()
    return make_plugin(folder, "dummy_runs_plugin:load", source)
