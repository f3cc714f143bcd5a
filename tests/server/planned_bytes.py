"""Compares the bytes of ``hisparse plan`` with those that a running server reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import Server

from hisparse.algorithms import entry_bytes
from hisparse.config import HiSparseConfig
from hisparse.engine.build import choose_selection
from hisparse.engine.capabilities import stored_spec
from hisparse.memory.sizing import resize, size
from hisparse.model_config import read_model_config
from hisparse.plan.fit import Machine, fit
from hisparse.plan.shapes import shape_per_rank
from hisparse.types import KVSpec

GIB = 2**30


def representation_bytes(settings: HiSparseConfig, shape: KVSpec) -> int:
    """Representations of a page, in all layers, as a CPU keeps them."""
    spec = stored_spec(settings, shape)
    _, _, kept = choose_selection(settings, spec, 1.0, "cpu")
    return entry_bytes(kept, "page", kv=spec)


def assert_planned(
    server: Server, model: Path, config: Mapping[str, Any], *, context: int, max_requests: int
) -> None:
    """Host memory, and device memory by part and in all, are those of the plan within 2%.

    Args:
        server: runs; its metrics say what it took.
        model: its folder, of which the plan reads the configuration.
        config: its ``--hisparse-config``, with ``host_memory`` and ``device_memory``.
        context: the longest sequence.
        max_requests: its ``--max-running-requests``.
    """
    settings = HiSparseConfig.from_dict(config)
    shape = shape_per_rank(read_model_config(model), settings.page_size, 1)
    # Servers of these tests run in float32, which SGLang only does if it is told to.
    shape = replace(shape, dtype=torch.float32)
    machine = Machine(
        device_bytes=4 * GIB, host_bytes=4 * GIB, tp=1, weight_bytes=1, mem_fraction=0.85
    )
    planned = fit(settings, shape, machine, context)
    assert planned.sizing is not None, planned.message
    # On a CPU there is no index of pages, no captured step, no workspace and no mapping.
    on_cpu = {"indexed": False, "captured": False, "workspace_bytes": (), "mapping_page_bytes": 0}
    kept = representation_bytes(settings, shape)
    request = replace(
        planned.sizing.request, max_requests=max_requests, representation_page_bytes=kept, **on_cpu
    )
    metrics = server.metrics()

    def reported(*names: str) -> float:
        return sum(metrics[f"hisparse:{name}_bytes"] for name in names)

    tokens = int(metrics["hisparse:host_tokens_total"])
    sizing, stored = resize(size(request), kv_tokens=tokens), tokens + settings.page_size
    pairs = {
        "host": (
            stored * planned.host_bytes_per_token, reported("host_kv", "host_representation")
        ),
        "device pages": (
            sizing.device["device pages"] + sizing.device["staging"], reported("device_kv")
        ),
        "device": (
            sizing.device_bytes,
            reported("device_kv", "device_representation", "device_table"),
        ),
    }  # fmt: skip
    for part, (expected, found) in pairs.items():
        assert 0.98 < expected / found < 1.02, f"{part}: planned {expected}, reported {found}"
