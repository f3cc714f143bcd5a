"""Shapes of models that several tests size or plan for."""

from __future__ import annotations

import torch

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
TWO_LAYERS = KVSpec(
    num_layers=2,
    num_q_heads=8,
    num_kv_heads=2,
    head_dim=64,
    v_head_dim=64,
    dtype=torch.bfloat16,
    page_size=16,
)
