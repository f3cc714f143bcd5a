"""Writes small packages that a server loads by entry point, as if they were installed."""

from __future__ import annotations

import textwrap
from pathlib import Path

_EXACT_PRODUCTS = """
    import torch


    def load():
        for module, name in ((torch.nn.functional, "linear"), (torch, "matmul")):
            setattr(module, name, in_float64(getattr(module, name)))


    def in_float64(product):
        def exact(*tensors):
            wide = (x if x is None else x.double() for x in tensors)
            return product(*wide).to(tensors[0].dtype)

        return exact
"""


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


def make_exact_products(folder: Path) -> Path:
    """A plugin that computes the model's products in float64.

    In float32 a product's rounding depends on the number of rows, so on which requests meet. Where
    two pages score alike, such noise decides which one is selected, and tokens differ. Hisparse
    calls neither of the two functions.
    """
    return make_plugin(folder, "exact_products:load", _EXACT_PRODUCTS)
