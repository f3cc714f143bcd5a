"""LoRA adapters of the tiny models, as PEFT writes them, and how to serve them on a CPU."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from plugins import make_plugin
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
#: Adapters can be loaded over HTTP, also if none is given at the start.
ADAPTER_FLAGS = (
    "--enable-lora", "--max-lora-rank", "8", "--lora-backend", "torch_native",
    "--lora-target-modules", *_MODULES,
)  # fmt: skip

#: SGLang's LoRA layers ask for page-locked memory, which a machine without a GPU cannot give.
_PAGEABLE = """
    import torch

    def pageable(make):
        return lambda *args, pin_memory=False, **options: make(*args, **options)

    def load():
        for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
            setattr(torch, name, pageable(getattr(torch, name)))
        torch.Tensor.pin_memory = lambda tensor, *args: tensor
"""


def adapter_path(folder: Path) -> list[Path]:
    """What goes on the module path of a server with adapters; written into ``folder``."""
    return [make_plugin(folder, "pageable_memory:load", _PAGEABLE)]


def write_adapter(folder: Path, seed: int, kind: str = "llama") -> Path:
    """Write an adapter over what the folder has, as training it anew would. Returns the folder."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind))
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=list(_MODULES)))
    rng = torch.Generator().manual_seed(seed)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data.normal_(0, 0.1, generator=rng)
    adapted.save_pretrained(folder)
    return folder
