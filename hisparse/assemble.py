"""Puts the parts together for one rank, whatever framework runs the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hisparse import sizing as sizing_formula
from hisparse.adapters import ADAPTERS
from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.batch import SelectionPolicy
from hisparse.cache import DeviceBuffer, HostKVPool, SparseKVCacheManager
from hisparse.cache.capacity import CapacityPlanner
from hisparse.config import HiSparseConfig
from hisparse.coordinator import SparseCoordinator
from hisparse.errors import ConfigError
from hisparse.metrics import CacheCounters
from hisparse.sizing import Sizing, SizingRequest
from hisparse.types import HostLayout, KVSpec, SelectionScope

__all__ = ["Plan", "assemble", "make_plan"]


@dataclass(kw_only=True)
class Plan:
    """What is decided before memory is allocated.

    Attributes:
        config: the settings.
        algorithm: what to keep.
        spec: shapes of the model.
        scale: softmax scale.
        scope: for whom pages are selected.
        layout: how host memory is ordered.
        sizing: how much of everything there is.
    """

    config: HiSparseConfig
    algorithm: BaseSparseAlgorithm
    spec: KVSpec
    scale: float
    scope: SelectionScope
    layout: HostLayout
    sizing: Sizing


def make_plan(
    config: HiSparseConfig,
    algorithm: BaseSparseAlgorithm,
    spec: KVSpec,
    scale: float,
    *,
    host_bytes: int,
    device_bytes: int,
    context_length: int,
    max_requests: int | None,
) -> Plan:
    """Choose scope and layout, and share out the memory.

    Args:
        config: the settings.
        algorithm: what ``config`` names.
        spec: shapes of the model.
        scale: softmax scale.
        host_bytes: for the KV pool.
        device_bytes: for all that hisparse keeps on the device.
        context_length: tokens, the longest sequence.
        max_requests: requests at once; None: ``sizing.DEFAULT_MAX_REQUESTS``.

    Raises:
        ConfigError: a setting does not go with the model or with another setting.
        CapacityError: one request does not fit.
    """
    scope = _choose_scope(config, algorithm)
    heads = spec.selection_heads(scope)
    representation_bytes = sum(r.num_bytes for r in algorithm.representations(spec).values())
    stored_heads = spec.num_kv_heads if heads == 1 else 1
    page_width = stored_heads * (spec.head_dim + spec.v_head_dim)
    sizing = sizing_formula.size(
        SizingRequest(
            kv_token_bytes=spec.token_bytes,
            representation_page_bytes=representation_bytes * spec.num_layers,
            page_size=spec.page_size,
            num_layers=spec.num_layers,
            rows_per_request=heads,
            device_page_bytes=spec.page_size * page_width * spec.dtype.itemsize,
            host_bytes=host_bytes,
            device_bytes=device_bytes,
            staging_bytes=config.staging_bytes or _default_staging_bytes(spec, device_bytes),
            device_buffer_size=config.device_buffer_size,
            max_row_capacity=config.max_row_capacity,
            context_length=context_length,
            max_requests=max_requests,
        )
    )
    _check_dense_layers(config, spec)
    return Plan(
        config=config,
        algorithm=algorithm,
        spec=spec,
        scale=scale,
        scope=scope,
        layout=config.host_layout or ("layer_first" if scope == "layer" else "page_head"),
        sizing=sizing,
    )


def _check_dense_layers(config: HiSparseConfig, spec: KVSpec) -> None:
    bad = sorted(x for x in config.dense_layers or () if x >= spec.num_layers)
    if bad:
        raise ConfigError(
            f"dense_layers names {bad}; the model has layers 0 to {spec.num_layers - 1}"
        )


def _choose_scope(config: HiSparseConfig, algorithm: BaseSparseAlgorithm) -> SelectionScope:
    adapter = ADAPTERS.get(config.adapter or "torch")
    both = [scope for scope in algorithm.scopes if scope in adapter.scopes]
    if config.selection_scope is None:
        return both[0]
    if config.selection_scope not in both:
        raise ConfigError(
            f"selection_scope {config.selection_scope!r} does not go with algorithm "
            f"{config.algorithm!r} and adapter {config.adapter or 'torch'!r} (choices: "
            f"{', '.join(both)})"
        )
    return config.selection_scope


def _default_staging_bytes(spec: KVSpec, device_bytes: int) -> int:
    """A tile of 8,192 tokens, or a sixteenth of the device memory where that is less."""
    return min(8192 * spec.token_bytes_per_layer, device_bytes // 16)


def assemble(
    plan: Plan, host: HostKVPool, *, num_slots: int, device: torch.device
) -> SparseCoordinator:
    """Allocate the device side of a plan for a host pool, and connect it all.

    Args:
        plan: its sizing has been fitted to the pool.
        host: the KV pool.
        num_slots: request slots, one that no request uses included.
        device: where device pages, representations and tables lie.
    """
    spec, config, sizing = plan.spec, plan.config, plan.sizing
    size, heads = spec.page_size, spec.selection_heads(plan.scope)
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
        max_requests=sizing.max_requests,
    )
    manager = SparseKVCacheManager(
        host,
        buffer,
        planner,
        staging_pages=max(1, sizing.staging_bytes // (size * spec.token_bytes_per_layer)),
        counters=CacheCounters(size, buffer.page_bytes, device),
        checked=config.checked,
    )
    representations = {
        name: torch.zeros((spec.num_layers, host.num_pages, *r.shape), dtype=r.dtype, device=device)
        for name, r in plan.algorithm.representations(spec).items()
    }
    policy = SelectionPolicy(
        kv=spec,
        scope=plan.scope,
        max_pages=config.budget // size - 1,
        num_sink_pages=config.num_sink_pages,
        num_recent_pages=config.num_recent_pages,
        scale=plan.scale,
    )
    return SparseCoordinator(
        policy,
        plan.algorithm,
        manager,
        ADAPTERS.get(config.adapter or "torch")(),
        representations,
        min_sparse_context=config.min_sparse_context,
        dense_layers=frozenset(config.dense_layers or ()),
    )
