"""Device memory of an evaluation, which determines its speed and not its figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hisparse.algorithms import build_algorithm
from hisparse.config import HiSparseConfig
from hisparse.engine.capabilities import choose_scope, row_tokens
from hisparse.memory.host import free_host_memory

#: Fraction of free memory for the device pages of all rows.
_FREE_FRACTION = 0.25


def with_smallest_buffer(model: Any, config: HiSparseConfig) -> HiSparseConfig:
    """The configuration with the fewest device pages that give the same selections."""
    from hisparse.transformers.model_shape import read_model_shape

    smallest = config.budget
    if build_algorithm(config).variable_lengths:
        smallest = config.min_row_tokens
    spec, _ = read_model_shape(model, config.page_size)
    config = replace(config, device_buffer_size=smallest, max_row_capacity=None)
    tokens = row_tokens(config, spec)
    return replace(config, device_buffer_size=tokens, max_row_capacity=tokens)


def rows_that_fit(model: Any, config: HiSparseConfig) -> int:
    """How many rows' device pages fit into memory, at least 1."""
    from hisparse.transformers.model_shape import read_model_shape

    spec, _ = read_model_shape(model, config.page_size)
    heads = spec.selection_heads(choose_scope(config, latent=spec.latent))
    # With a selection per query head, each query head has its own copy of its KV head's pages.
    copies = max(1, heads // spec.num_kv_heads)
    row_bytes = config.min_row_tokens * spec.token_bytes * copies
    device = torch.device(getattr(model, "device", "cpu"))
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()
    return max(1, int(_FREE_FRACTION * free) // row_bytes)
