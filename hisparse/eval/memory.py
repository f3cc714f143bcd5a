"""How much device memory an evaluation takes: figures do not depend on it, only speed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hisparse.algorithms import build_algorithm
from hisparse.config import HiSparseConfig
from hisparse.engine.capabilities import choose_scope
from hisparse.memory.host import free_host_memory

__all__ = ["rows_that_fit", "with_smallest_buffer"]

#: Of free memory, for the device pages of all rows.
_PART = 0.25


def with_smallest_buffer(config: HiSparseConfig) -> HiSparseConfig:
    """The same selections on as few device pages as they need, so that many rows fit."""
    least = config.budget
    if build_algorithm(config).variable_lengths:
        least = config.min_row_tokens
    return replace(config, device_buffer_size=least, max_row_capacity=least)


def rows_that_fit(model: Any, config: HiSparseConfig) -> int:
    """Rows whose device pages fit, at least 1."""
    from hisparse.transformers.shape import read_model_shape

    spec, _ = read_model_shape(model, config.page_size)
    heads = spec.selection_heads(choose_scope(config, latent=spec.latent))
    # A selection per query head means a copy of its KV head's pages for each of them.
    copies = max(1, heads // spec.num_kv_heads)
    row_bytes = config.min_row_tokens * spec.token_bytes * copies
    device = torch.device(getattr(model, "device", "cpu"))
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()
    return max(1, int(_PART * free) // row_bytes)
