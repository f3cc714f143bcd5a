"""How a hybrid is served on a CPU.

Hybrids mix attention with linear attention or convolutions, whose states SGLang keeps. A CPU runs
these layers with the stand-ins of ``cpu_standins/`` and ``scripts/torch_kernels.py``.
"""

from __future__ import annotations

from pathlib import Path

from scripts.random_weights import make_plugin

#: Kinds of ``tiny_models``.
HYBRIDS = ("qwen3_next", "lfm2", "kimi_linear")
#: States of other layers, of running requests and of prefixes in the radix cache.
FLAGS = ("--max-mamba-cache-size", "64")
ENV = {"TORCHDYNAMO_DISABLE": "1", "SGLANG_MAMBA_CONV_DTYPE": "float32"}


def python_path(folder: Path) -> list[Path]:
    """What goes on a server's module path; the plug-in is written into ``folder``."""
    return [make_plugin(folder), Path(__file__).parent.parent.parent]
