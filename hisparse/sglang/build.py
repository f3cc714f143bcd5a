"""Puts the parts together for one rank of SGLang."""

from __future__ import annotations

import logging
from typing import Any

import torch

from hisparse.adapters import ADAPTERS
from hisparse.batch import SelectionPolicy
from hisparse.cache import DeviceBuffer, SparseKVCacheManager
from hisparse.cache.capacity import CapacityPlanner
from hisparse.coordinator import SparseCoordinator
from hisparse.metrics import CacheCounters
from hisparse.sglang.runtime import Session
from hisparse.sizing import resize

__all__ = ["build_coordinator"]

logger = logging.getLogger("hisparse")


def build_coordinator(session: Session, model_runner: Any) -> SparseCoordinator:
    """Allocate the device side for the pools that SGLang has built, and connect it all."""
    spec, config = session.spec, session.config
    pool, rows = model_runner.token_to_kv_pool, model_runner.req_to_token_pool
    # --max-total-tokens and --max-running-requests may have lowered what was planned.
    session.sizing = sizing = resize(session.sizing, kv_tokens=pool.size, max_requests=rows.size)
    device = torch.device(model_runner.device)
    size = spec.page_size
    heads = spec.selection_heads(session.scope)
    num_slots = rows.req_to_token.shape[0]
    buffer = DeviceBuffer(
        spec,
        heads=heads,
        num_slots=num_slots,
        num_pages=sizing.num_device_pages,
        max_row_pages=sizing.max_row_capacity // size,
        device=device,
    )
    planner = CapacityPlanner(
        total_pages=buffer.free_pages.shape[1],
        rows_per_request=heads,
        min_pages=config.device_buffer_size // size,
        max_pages=sizing.max_row_capacity // size,
        max_requests=rows.size,
    )
    manager = SparseKVCacheManager(
        pool.host,
        buffer,
        planner,
        staging_pages=max(1, sizing.staging_bytes // (size * spec.token_bytes_per_layer)),
        counters=CacheCounters(size, buffer.page_bytes, device),
        checked=config.checked,
    )
    representations = {
        name: torch.zeros(
            (spec.num_layers, pool.host.num_pages, *r.shape), dtype=r.dtype, device=device
        )
        for name, r in session.algorithm.representations(spec).items()
    }
    policy = SelectionPolicy(
        kv=spec,
        scope=session.scope,
        max_pages=config.budget // size - 1,
        num_sink_pages=config.num_sink_pages,
        num_recent_pages=config.num_recent_pages,
        scale=session.scale,
    )
    logger.info("hisparse: %s", sizing.describe())
    return SparseCoordinator(
        policy,
        session.algorithm,
        manager,
        ADAPTERS.get(config.adapter or "torch")(),
        representations,
        min_sparse_context=config.min_sparse_context,
        dense_layers=frozenset(config.dense_layers or ()),
    )
