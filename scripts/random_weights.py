"""A plug-in of SGLang's: random weights with which attention matters.

``--load-format dummy`` fills weights with numbers of about 0.001, so that every model repeats one
token. With these weights activations have unit variance and attention is peaked, and a weight is
the same in every server.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch

from scripts import torch_kernels

_TARGET = "sglang.srt.model_loader.loader.initialize_dummy_weights"


@torch.no_grad()
def fill(model: torch.nn.Module, *_: Any, **__: Any) -> None:
    """Fill the floating-point weights of SGLang's ``model``, each from a seed of its name."""
    for name, weight in model.state_dict().items():
        if not weight.is_floating_point():
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        mean, width = 0.0, 0.3
        if weight.ndim > 1 and ("embed" in name or "wte" in name):
            # Small enough that a model which ends with its embeddings does not repeat its input.
            width = 0.1
        elif weight.ndim > 1:
            width = (2.0 if "qkv" in name else 1.5) / weight.shape[-1] ** 0.5
        elif name.endswith("weight") and ("norm" in name or ".ln_" in name):
            mean, width = 1.0, 0.1
        weight.copy_(mean + torch.randn(weight.shape, generator=generator) * width)


def register() -> None:
    """Replace SGLang's own dummy weights."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_TARGET, fill, HookType.REPLACE)


def make_plugin(folder: Path) -> Path:
    """Write a distribution into ``folder``, which goes on the module path.

    Its entry points are this plug-in, and that of ``scripts/torch_kernels.py``.
    """
    info = folder / "random_weights-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: random-weights\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\nrandom-weights = {__name__}:register\n"
        f"torch-kernels = {torch_kernels.__name__}:register\n"
    )
    return folder
