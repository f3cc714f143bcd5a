"""Estimates beside the measured times of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hisparse.config import HiSparseConfig
from hisparse.plan.estimate import estimate_step
from hisparse.plan.hardware import find_hardware
from hisparse.types import KVSpec

__all__ = ["estimate_case"]


def estimate_case(case: Mapping[str, Any], device_name: str) -> dict[str, float] | None:
    """Estimates beside the times of a case of ``hisparse bench decode`` on a GPU.

    Args:
        case: one of the ``cases`` of the benchmark's report.
        device_name: the name that CUDA gives to the GPU.

    Returns:
        implementation to us; None: another benchmark, or a GPU that the table lacks.
    """
    hardware, params = find_hardware(device_name), case["params"]
    if hardware is None or case["name"] != "decode":
        return None
    spec = KVSpec(
        num_layers=1,
        num_q_heads=params["q_heads"],
        num_kv_heads=params["kv_heads"],
        head_dim=params["head_dim"],
        v_head_dim=params.get("v_head_dim", params["head_dim"]),
        dtype=getattr(torch, params["dtype"]),
        page_size=params["page_size"],
        latent="v_head_dim" in params,
        index_head_dim=params.get("index_dim", 0),
    )
    found = estimate_step(
        HiSparseConfig(
            algorithm=params["algorithm"],
            budget=params["budget"],
            page_size=params["page_size"],
            cuda_graph=True,
        ),
        spec,
        hardware,
        context=params["context"],
        batch=params["batch"],
        hit_ratio=1 - params["miss_ratio"],
    )
    peers = ("sdpa", "flashinfer", "flashinfer_tensor_cores")
    dense = dict.fromkeys(peers, found.dense_us)
    return dense | {"cuda": found.hisparse_us}
