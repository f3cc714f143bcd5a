"""Shapes and softmax scales of models that SGLang runs with the code of transformers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from hisparse.errors import HiSparseError
from hisparse.sglang.backend import HiSparseAttnBackend
from hisparse.sglang.models import read_model_shape

#: SGLang warns while it is imported.
pytestmark = pytest.mark.filterwarnings("ignore")


def fallback(scales: list[float | None]) -> torch.nn.Module:
    """A model as ``sglang.srt.models.transformers`` makes it, with a scale for each layer.

    A layer of None gets its scale from SGLang.
    """
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Module() for _ in scales)
    for number, (layer, scale) in enumerate(zip(model.layers, scales, strict=True)):
        layer.layer_idx = number
        if scale is not None:
            layer.scaling = scale
    model.attention_instances = {
        i: RadixAttention(4, 32, 0.25, num_kv_heads=2, layer_id=i) for i in range(len(scales))
    }
    return model


@pytest.mark.parametrize("scales, expected", [([0.5] * 3, 0.5), ([None] * 3, 0.25)])
def test_the_layers_of_the_fallback(scales: list[float | None], expected: float) -> None:
    spec, scale, layer_ids = read_model_shape(fallback(scales), torch.float32, 16, 2048)
    assert (spec.num_layers, spec.num_q_heads, spec.num_kv_heads, spec.head_dim) == (3, 4, 2, 32)
    assert scale == expected and layer_ids == (0, 1, 2)


def test_a_scale_that_a_forward_changes_is_an_error() -> None:
    """OPT's code in transformers scales the queries itself, and passes 1."""
    backend = HiSparseAttnBackend.__new__(HiSparseAttnBackend)
    backend.num_tokens, backend._scale = 1, 0.25
    layer = RadixAttention(4, 32, 1.0, num_kv_heads=2, layer_id=2)
    q, k = torch.zeros(1, 128), torch.zeros(1, 2, 32)
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: False))
    with pytest.raises(HiSparseError, match="layer 2: got the softmax scale 1.0, expected 0.25"):
        backend.forward(q, k, k, layer, batch)
