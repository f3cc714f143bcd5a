"""Puts the parts together for one rank, whatever framework runs the model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hisparse.adapters import ADAPTERS, ChosenAdapter, choose_adapter
from hisparse.algorithms import ALGORITHMS, BaseSparseAlgorithm
from hisparse.cache import DeviceBuffer, HostKVPool, Overlap, SparseKVCacheManager
from hisparse.cache.capacity import CapacityPlanner
from hisparse.cache.counters import CacheCounters
from hisparse.cache.streams import make_streams
from hisparse.config import HiSparseConfig
from hisparse.engine.coordinator import SparseCoordinator
from hisparse.engine.representations import Representations
from hisparse.engine.step import SelectionPolicy
from hisparse.errors import ConfigError
from hisparse.memory import sizing as sizing_formula
from hisparse.memory.costs import Resources, kept_representations, make_sizing_request, tile_pages
from hisparse.memory.sizing import Sizing
from hisparse.types import HostLayout, KVSpec, SelectionScope

__all__ = [
    "Plan",
    "Resources",
    "assemble",
    "check_capabilities",
    "choose_scope",
    "make_plan",
    "make_policy",
    "page_limits",
    "stored_spec",
]

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Plan:
    """What is decided before memory is allocated.

    Attributes:
        config: the settings.
        algorithm: what to keep.
        spec: shapes of the model.
        policy: what selections have to keep to.
        layout: how host memory is ordered.
        adapter: what attends, and why.
        sizing: how much of everything there is.
    """

    config: HiSparseConfig
    algorithm: BaseSparseAlgorithm
    spec: KVSpec
    policy: SelectionPolicy
    layout: HostLayout
    adapter: ChosenAdapter
    sizing: Sizing


def page_limits(
    algorithm: BaseSparseAlgorithm, page_size: int, *, budget: int, device_buffer_size: int
) -> tuple[int, int]:
    """``budget_pages`` and ``max_pages`` of a policy, from sizes in tokens."""
    cap = device_buffer_size if algorithm.variable_lengths else budget
    return budget // page_size - 1, cap // page_size - (not algorithm.ranks_tail)


def make_policy(
    config: HiSparseConfig,
    algorithm: BaseSparseAlgorithm,
    spec: KVSpec,
    scale: float,
    scope: SelectionScope,
) -> SelectionPolicy:
    """What the selections of ``algorithm`` have to keep to under ``config``."""
    budget_pages, max_pages = page_limits(
        algorithm,
        spec.page_size,
        budget=config.budget,
        device_buffer_size=config.device_buffer_size,
    )
    return SelectionPolicy(
        kv=spec,
        scope=scope,
        budget_pages=budget_pages,
        max_pages=max_pages,
        num_sink_pages=config.num_sink_pages,
        num_recent_pages=config.num_recent_pages,
        scale=scale,
    )


def stored_spec(config: HiSparseConfig, spec: KVSpec) -> KVSpec:
    """The shapes of a model whose K and V are stored as ``config`` says.

    Raises:
        ConfigError: they cannot be.
    """
    if config.stores_fp8 and spec.latent:
        raise ConfigError(
            f"kv_cache_dtype: got {config.kv_cache_dtype!r} for a model with latent attention "
            "(MLA), expected 'auto'; fp8_e4m3 is for MHA and GQA models"
        )
    return replace(spec, fp8=config.stores_fp8)


def make_plan(
    config: HiSparseConfig,
    algorithm: BaseSparseAlgorithm,
    spec: KVSpec,
    scale: float,
    resources: Resources,
) -> Plan:
    """Choose scope and layout, and share out the memory.

    Args:
        config: the settings.
        algorithm: what ``config`` names.
        spec: shapes of the model.
        scale: softmax scale.
        resources: what there is.

    Raises:
        ConfigError: a setting does not go with the model or with another setting.
        CapacityError: one request does not fit.
    """
    check_capabilities(config, resources.device_type)
    scope = choose_scope(config, latent=spec.latent)
    policy = make_policy(config, algorithm, spec, scale, scope)
    algorithm = algorithm.settled(
        policy,
        context_length=resources.context_length,
        host_bytes=resources.host_bytes,
        device_bytes=resources.device_bytes,
    )
    _check_dense_layers(config, spec)
    _check_overlap(config, policy)
    adapter = choose_adapter(resources.device_type, spec, scope, config.adapter)
    attends = ADAPTERS.get(adapter.name)
    request = make_sizing_request(config, algorithm, policy, attends, resources)
    return Plan(
        config=config,
        algorithm=algorithm,
        spec=spec,
        policy=policy,
        layout=config.host_layout or ("layer_first" if scope == "layer" else "page_head"),
        adapter=adapter,
        sizing=sizing_formula.size(request),
    )


def _check_overlap(config: HiSparseConfig, policy: SelectionPolicy) -> None:
    """Split attention counts on the pages of the last step, which may not make way for a tail."""
    least = (policy.max_pages + 1) * config.page_size
    if config.overlap == "attention" and config.device_buffer_size < least:
        raise ConfigError(
            f"overlap: got 'attention' with device_buffer_size {config.device_buffer_size}, "
            f"expected at least {least}, what {config.algorithm} selects and a page, or "
            "overlap 'transfers'"
        )


def _check_dense_layers(config: HiSparseConfig, spec: KVSpec) -> None:
    bad = sorted(x for x in config.dense_layers or () if x >= spec.num_layers)
    if bad:
        raise ConfigError(
            f"dense_layers names {bad}; the model has layers 0 to {spec.num_layers - 1}"
        )


def check_capabilities(config: HiSparseConfig, device_type: str) -> None:
    """Whether the algorithm can do what is asked for, as far as it depends on no model.

    Args:
        config: names the algorithm, the adapter, the page size and the scope.
        device_type: "cuda" or "cpu", where the model runs.

    Raises:
        ConfigError: it cannot; names those that can.
    """
    cls = ALGORITHMS.get(config.algorithm)

    def takes_page_size(cls: type[BaseSparseAlgorithm]) -> bool:
        return cls.page_sizes is None or config.page_size in cls.page_sizes

    def takes_device(cls: type[BaseSparseAlgorithm]) -> bool:
        return device_type == "cpu" or not cls.reads_host_keys

    wants: list[tuple[str, Callable[[type[BaseSparseAlgorithm]], bool]]] = [
        (f"page_size {config.page_size}", takes_page_size),
        (f"device {device_type}", takes_device),
    ]
    if config.stores_fp8:
        wants.append((f"kv_cache_dtype {config.kv_cache_dtype}", lambda c: not c.reads_host_keys))
    if config.speculate is not None:
        wants.append((f"speculate {config.speculate!r}", lambda cls: not cls.ranks_tail))
    for what, can in wants:
        if not can(cls):
            others = ", ".join(name for name in ALGORITHMS if can(ALGORITHMS.get(name)))
            sizes = f" (its page sizes: {', '.join(map(str, cls.page_sizes or ()))})"
            raise ConfigError(
                f"algorithm {config.algorithm!r} cannot do {what}"
                f"{sizes if can is takes_page_size else ''}; algorithms that can: {others}"
            )
    choose_scope(config)
    choose_adapter(device_type, None, config.selection_scope, config.adapter, fp8=config.stores_fp8)


def choose_scope(config: HiSparseConfig, *, latent: bool = False) -> SelectionScope:
    """The scope that is asked for, or else what algorithm and adapter do best.

    Args:
        config: names them.
        latent: whether the model has one latent for all query heads.

    Raises:
        ConfigError: they cannot do it; names those that can.
    """
    adapter, wanted = ADAPTERS.get(config.adapter or "torch"), config.selection_scope

    def scopes_of(name: str) -> list[SelectionScope]:
        both = [scope for scope in ALGORITHMS.get(name).scopes if scope in adapter.scopes]
        return [scope for scope in both if not (latent and scope == "query_head")]

    choices = scopes_of(config.algorithm)
    if wanted is None and choices:
        return choices[0]
    if wanted is None or wanted not in choices:
        others = [n for n in ALGORITHMS if (wanted in scopes_of(n) if wanted else scopes_of(n))]
        raise ConfigError(
            f"selection_scope {wanted!r} does not go with algorithm {config.algorithm!r}, adapter "
            f"{config.adapter or 'torch'!r}{' and latent attention (MLA)' if latent else ''} "
            f"(choices: {', '.join(choices) or 'none'}; algorithms that can: "
            f"{', '.join(others) or 'none'})"
        )
    return wanted


def _make_overlap(
    config: HiSparseConfig, policy: SelectionPolicy, device: torch.device
) -> Overlap | None:
    if config.overlap is None:
        return None
    split_pages = policy.max_pages if config.overlap == "attention" else None
    return Overlap(make_streams(device), split_pages)


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
    size, heads = spec.page_size, plan.policy.heads
    logger.info("adapter %s: %s", *plan.adapter)
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
        staging_pages=tile_pages(config, spec, sizing.staging_bytes),
        counters=CacheCounters(size, buffer.page_bytes, device),
        checked=config.checked,
        overlap=_make_overlap(config, plan.policy, device),
    )
    representations = Representations(
        kept_representations(config, plan.algorithm, plan.policy),
        num_layers=spec.num_layers,
        host_pages=host.num_pages,
        num_slots=num_slots,
        device=device,
        index_bytes=plan.algorithm.host_token_bytes(spec) * host.num_pages * size,
    )
    return SparseCoordinator(
        plan.policy,
        plan.algorithm,
        manager,
        ADAPTERS.get(plan.adapter.name)(),
        representations,
        min_sparse_context=config.min_sparse_context,
        dense_layers=frozenset(config.dense_layers or ()),
        reuse_layers=config.reuse_layers,
        tail_estimate=config.tail_estimate,
        speculate=config.speculate,
        speculation_threshold=config.speculation_threshold,
    )
