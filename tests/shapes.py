"""Shapes of models that several tests size or plan for."""

from __future__ import annotations

from typing import Any

import torch

from hisparse.cache.formats import format_of
from hisparse.memory.costs import Resources
from hisparse.types import KVSpec

#: Llama-3.1-8B in bfloat16 with pages of 16 tokens.
LLAMA = KVSpec(
    num_layers=32,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    v_head_dim=128,
    dtype=torch.bfloat16,
    page_size=16,
)
#: Bytes of its K and V of a token, all layers.
TOKEN_BYTES = format_of(LLAMA).token_bytes
TWO_LAYERS = KVSpec(
    num_layers=2,
    num_q_heads=8,
    num_kv_heads=2,
    head_dim=64,
    v_head_dim=64,
    dtype=torch.bfloat16,
    page_size=16,
)


def small_spec(**changes: Any) -> KVSpec:
    """Two layers of four query heads in float32, with pages of four tokens."""
    sizes = {"num_layers": 2, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 8}
    return KVSpec(**sizes | {"dtype": torch.float32, "page_size": 4} | changes)


def machine(**changes: Any) -> Resources:
    """A CPU's, for four requests of 8,192 tokens."""
    sizes = {"host_bytes": 64 << 30, "device_bytes": 16 << 30, "context_length": 8192}
    return Resources(**sizes | {"max_requests": 4, "device_type": "cpu"} | changes)
