"""Draft models for the tiny models, made on the spot from the target's own weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from torch import Tensor

#: Counted up when the weights change, so that no old folder is taken.
_VERSION = 1

#: Noise, relative to a weight, with which a draft model is right about half of the time.
_NOISE = 0.03


def noisy_model(kind: str) -> Path:
    """A tiny model with noise in its weights: its greedy tokens are often those of the model."""
    folder = _folder(f"{kind}-noisy")
    if not (folder / "config.json").exists():
        noise = torch.Generator().manual_seed(3)
        weights = {
            name: x * (1 + _NOISE * torch.randn(x.shape, generator=noise))
            for name, x in _weights(kind).items()
        }
        _save(folder, weights, _config(kind))
    return folder


def eagle_head(kind: str) -> Path:
    """EAGLE's head: the model's last layer on its hidden states and embeddings."""
    folder = _folder(f"{kind}-eagle")
    if not (folder / "config.json").exists():
        config = _config(kind)
        weights, size = _last_layer(kind, "layers.0."), config["hidden_size"]
        del weights["layers.0.input_layernorm.weight"]
        weights |= {"fc.weight": _mixture(size, 2), "fc.bias": torch.zeros(size)}
        changed = {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
        _save(folder, weights, config | changed)
    return folder


def eagle3_head(kind: str) -> Path:
    """EAGLE3's head, on hidden states of three layers."""
    folder = _folder(f"{kind}-eagle3")
    if not (folder / "config.json").exists():
        config = _config(kind)
        weights, size = _last_layer(kind, "midlayer."), config["hidden_size"]
        for name in ("q_proj", "k_proj", "v_proj"):
            key = f"midlayer.self_attn.{name}.weight"
            weights[key] = weights[key].repeat(1, 2) / 2
        weights |= {
            "midlayer.hidden_norm.weight": torch.ones(size),
            "norm.weight": torch.ones(size),
            "fc.weight": _mixture(size, 3),
            "lm_head.weight": _weights(kind)["lm_head.weight"],
        }
        changed = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "draft_vocab_size": config["vocab_size"],
        }
        _save(folder, weights, config | changed)
    return folder


def with_next_layer(kind: str) -> Path:
    """A tiny DeepSeek model with a layer for the token after the next one (MTP)."""
    folder = _folder(f"{kind}-nextn")
    if not (folder / "config.json").exists():
        config, weights = _config(kind), _weights(kind)
        prefix, size = f"model.layers.{config['num_hidden_layers']}.", config["hidden_size"]
        weights |= _last_layer(kind, prefix)
        weights |= {
            f"{prefix}{name}.weight": torch.ones(size)
            for name in ("enorm", "hnorm", "shared_head.norm")
        }
        weights |= {
            f"{prefix}eh_proj.weight": _mixture(size, 2),
            f"{prefix}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
            f"{prefix}shared_head.head.weight": weights["lm_head.weight"].clone(),
        }
        _save(folder, weights, config | {"num_nextn_predict_layers": 1})
    return folder


def _folder(name: str) -> Path:
    return tiny_model("llama").parent / f"tiny-{name}-v{_VERSION}"


def _config(kind: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((tiny_model(kind) / "config.json").read_text())
    return config


def _weights(kind: str) -> dict[str, Tensor]:
    return load_file(tiny_model(kind) / "model.safetensors")


def _last_layer(kind: str, prefix: str) -> dict[str, Tensor]:
    """Weights of a model's last layer, with another prefix."""
    old = f"model.layers.{_config(kind)['num_hidden_layers'] - 1}."
    found = {n: x.clone() for n, x in _weights(kind).items() if n.startswith(old)}
    return {prefix + name.removeprefix(old): x for name, x in found.items()}


def _mixture(size: int, parts: int) -> Tensor:
    """``[size, parts * size]``: the sum of ``parts`` vectors."""
    return torch.eye(size).repeat(1, parts)


def _save(folder: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
