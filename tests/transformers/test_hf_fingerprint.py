"""What a model's fingerprint tells apart, and a model that cannot be read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hisparse.errors import ConfigError
from hisparse.eval.models import load
from hisparse.transformers import disable, enable
from hisparse.transformers.fingerprint import UnchangedModel, model_fingerprint
from tests.server.tiny_models import tiny_model
from tests.transformers.hf_models import SMALL, model


def test_a_fingerprint_tells_models_apart_and_not_their_copies(tmp_path: Path) -> None:
    net = model("llama")
    found = model_fingerprint(net)
    net.save_pretrained(tmp_path)
    copy = type(net).from_pretrained(tmp_path)
    assert model_fingerprint(copy) == found
    enable(copy, SMALL, max_length=64)
    assert model_fingerprint(copy) == found, "switching hisparse on changes no weight"
    disable(copy)
    weight = copy.model.layers[2].mlp.down_proj.weight
    with torch.no_grad():
        weight.mul_(1.001)
    assert model_fingerprint(copy) != found
    with torch.no_grad():
        weight.copy_(net.model.layers[2].mlp.down_proj.weight)
    assert model_fingerprint(copy) == found
    copy.config.rms_norm_eps *= 2
    assert model_fingerprint(copy) != found
    assert model_fingerprint(net.config) == "", "a configuration has no weights"


def test_a_model_with_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    shutil.copytree(tiny_model("llama"), tmp_path / "model")
    weights = next((tmp_path / "model").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot be read: SafetensorError: ") as caught:
        load(AutoModelForCausalLM, str(tmp_path / "model"))
    assert "\n" not in str(caught.value)
    (tmp_path / "model" / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="cannot be read: "):
        load(AutoConfig, str(tmp_path / "model"))


def test_a_tensor_with_more_elements_than_a_float32_counts() -> None:
    """An embedding of 49,152 tokens with a width of 576 has such a length."""
    net = torch.nn.Module()
    net.register_buffer("table", torch.zeros(49152 * 576, dtype=torch.int8))
    unchanged = UnchangedModel(net)
    unchanged.check()
    net.table.data.add_(1)  # A write that PyTorch does not count.
    with pytest.raises(ConfigError, match="another buffer table"):
        unchanged.check()
