"""Builds an engine, for the server, transformers, the simulator and the benches."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hisparse.adapters import ADAPTERS, BackendAdapter, ChosenAdapter, choose_adapter
from hisparse.algorithms import (
    BaseSparseAlgorithm,
    Representation,
    SelectionPolicy,
    build_algorithm,
)
from hisparse.cache import Counters, HostKVPool, PoolSizes, SparseKVCacheManager
from hisparse.cache.formats import format_of
from hisparse.cache.streams import SideStream
from hisparse.config import EXTENSIONS, HiSparseConfig, Resolved
from hisparse.engine.capabilities import (
    check_capabilities,
    choose_scope,
    resolve_miss,
    resolve_settings,
    row_tokens,
)
from hisparse.engine.contract import call, named
from hisparse.engine.coordinator import SparseCoordinator
from hisparse.engine.extensions.base import Components, Extension, GatherQueries
from hisparse.engine.modes import AttentionModes
from hisparse.engine.representations import Representations
from hisparse.errors import AlgorithmError
from hisparse.memory import sizing as sizing_formula
from hisparse.memory.costs import Resources, make_sizing_request, tile_pages
from hisparse.memory.sizing import Sizing
from hisparse.types import KVSpec, SelectionScope

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """All decisions that precede the allocation of memory.

    Attributes:
        resolved: the settings.
        algorithm: selects pages.
        spec: shapes of the model.
        policy: the rules of selections.
        adapter: the chosen attention backend, and the reason for the choice.
        sizing: division of host and device memory.
    """

    resolved: Resolved
    algorithm: BaseSparseAlgorithm
    spec: KVSpec
    policy: SelectionPolicy
    adapter: ChosenAdapter
    sizing: Sizing


def make_policy(
    config: HiSparseConfig,
    algorithm: BaseSparseAlgorithm,
    spec: KVSpec,
    scale: float,
    scope: SelectionScope,
    device: str = "cuda",
) -> SelectionPolicy:
    """The rules of selections that follow from settings, algorithm, model and type of device."""
    size = spec.page_size
    pages = algorithm.attended_tokens(config.budget, row_tokens(config, spec)) // size
    return SelectionPolicy(
        kv=spec,
        scope=scope,
        budget_pages=config.budget // size - 1,
        max_pages=pages if algorithm.ranks_tail else pages - 1,
        variable_lengths=algorithm.variable_lengths,
        tail_below=pages if algorithm.ranks_tail else None,
        num_sink_pages=config.num_sink_pages,
        num_recent_pages=config.num_recent_pages,
        scale=scale,
        logit_cap=spec.logit_cap,
        device=device,
    )


def kept_tensors(
    config: HiSparseConfig, algorithm: BaseSparseAlgorithm, policy: SelectionPolicy
) -> dict[str, Representation]:
    """Tensors that the algorithm and the extensions keep beside K and V, by name.

    Raises:
        AlgorithmError: the algorithm uses the model's indexer, and no representation of pages says
            so: stores and prefill servers would lose the indexer's keys.
    """
    kept = dict(call(algorithm.representations, None, policy))
    of_model = [name for name, x in kept.items() if (x.per, x.source) == ("page", "model")]
    if algorithm.indexer and not of_model:
        raise AlgorithmError(
            f"{named(algorithm, 'representations')}: got {', '.join(kept) or 'none'} of source "
            "'kv', expected source='model' for what the model's indexer gives (indexer is "
            f"{algorithm.indexer!r})"
        )
    for name, options in config.extensions.items():
        kept |= EXTENSIONS.get(name).state(options, policy)
    return kept


def choose_selection(
    config: HiSparseConfig, spec: KVSpec, scale: float, device: str = "cuda"
) -> tuple[BaseSparseAlgorithm, SelectionPolicy, dict[str, Representation]]:
    """The algorithm, the rules of its selections, and :func:`kept_tensors`.

    Args:
        device: type of the device that decodes.

    Raises:
        ConfigError: a setting is incompatible with the model or with another setting.
    """
    algorithm, scope = build_algorithm(config), choose_scope(config, format_of(spec))
    policy = make_policy(config, algorithm, spec, scale, scope, device)
    return algorithm, policy, kept_tensors(config, algorithm, policy)


def resolve(
    config: HiSparseConfig,
    spec: KVSpec,
    scale: float,
    resources: Resources,
    layers: Sequence[int] | None = None,
) -> EngineSetup:
    """Decide everything that the settings leave open, and divide the memory.

    Args:
        layers: the model's numbers of the layers of ``spec``, for ``dense_layers``, or None if they
            start at 0.

    Raises:
        ConfigError: a setting is incompatible with the model or with another setting.
        CapacityError: the memory is too small for one request.
    """
    check_capabilities(config, resources.device_type)
    config = resolve_miss(config, spec, resources.device_type)
    algorithm, policy, kept = choose_selection(config, spec, scale, resources.device_type)
    captured = resources.captures and config.not_captured(resources.device_type) is None
    resolved = resolve_settings(config, spec, policy.scope, layers, captured=captured)
    adapter = choose_adapter(
        resources.device_type,
        spec,
        policy.scope,
        config.adapter,
        scaled=format_of(spec).scaled_name(spec.kv_cache_dtype),
        device=resources.device,
        rules=policy.layer_rules,
    )
    request = make_sizing_request(
        resolved,
        policy,
        resources,
        kept=kept,
        adapter=ADAPTERS.get(adapter.name),
        captured_request_bytes=call(
            algorithm.captured_bytes, None, policy, -(-resources.context_length // spec.page_size)
        ),
        prefill_choices=call(algorithm.prefill_choices, None, policy),
    )
    return EngineSetup(
        resolved=resolved,
        algorithm=algorithm,
        spec=spec,
        policy=policy,
        adapter=adapter,
        sizing=sizing_formula.size(request),
    )


def build_engine(
    setup: EngineSetup,
    host: HostKVPool,
    *,
    device: torch.device,
    gather_queries: GatherQueries | None = None,
) -> SparseCoordinator:
    """Allocate device memory for a setup and build its engine.

    Args:
        setup: all decisions; the sizing matches the host pool.
        device: device of the device pages, representations and tables.
        gather_queries: joins the query heads of ranks whose model has the same KV heads, from
            ``[B, Hq, D]`` to ``[B, ranks * Hq, D]``; or None if no other rank has them.
    """
    sizing, size = setup.sizing, setup.spec.page_size
    logger.info("adapter %s: %s", *setup.adapter)
    sizes = PoolSizes(
        num_slots=sizing.max_requests + 1,
        device_pages=sizing.num_device_pages,
        min_row_pages=sizing.request.min_row_pages,
        max_row_pages=sizing.max_row_capacity // size,
        context_pages=sizing.request.context_pages,
        staging_pages=tile_pages(setup.spec, sizing.request.staging_bytes),
    )
    return build(
        setup.resolved,
        setup.algorithm,
        setup.policy,
        ADAPTERS.get(setup.adapter.name)(),
        host=host,
        sizes=sizes,
        device=device,
        gather_queries=gather_queries,
    )


def build(
    resolved: Resolved,
    algorithm: BaseSparseAlgorithm,
    policy: SelectionPolicy,
    adapter: BackendAdapter,
    *,
    host: HostKVPool,
    sizes: PoolSizes,
    device: torch.device,
    aside: SideStream | None = None,
    gather_queries: GatherQueries | None = None,
) -> SparseCoordinator:
    """Connect the components of an engine.

    Args:
        sizes: sizes of the allocations on the device.
        device: device of the device pages, representations and tables.
        aside: replaces the device's own side stream.
        gather_queries: see :func:`build_engine`.
    """
    config = resolved.config
    types: dict[str, type[Extension]] = {x: EXTENSIONS.get(x) for x in config.extensions}
    counters = Counters(device, [x for cls in types.values() for x in cls.counters])
    policy = replace(policy, invalid_scores=counters.total("invalid_scores"))
    manager = SparseKVCacheManager(
        host, sizes, device, policy.heads, counters, checked=config.checked, aside=aside
    )
    kept = kept_tensors(config, algorithm, policy)
    representations = Representations(
        kept,
        policy.kv,
        host_pages=host.num_pages,
        num_slots=sizes.num_slots,
        device=device,
    )
    call(algorithm.initialize, None, representations.tensors, policy)
    components = Components(
        config=config,
        policy=policy,
        algorithm=algorithm,
        manager=manager,
        adapter=adapter,
        representations=representations,
        modes=AttentionModes(
            policy,
            min_sparse_context=config.min_sparse_context,
            dense_layers=resolved.dense_layers,
            reuse_layers=config.reuse_layers,
        ),
        gather_queries=gather_queries if _exchanges_queries(algorithm, policy, kept) else None,
    )
    extensions = {n: cls(config.extensions[n], components) for n, cls in types.items()}
    return SparseCoordinator(components, extensions)


def _exchanges_queries(
    algorithm: BaseSparseAlgorithm, policy: SelectionPolicy, kept: dict[str, Representation]
) -> bool:
    """Whether ranks with the same KV heads select for all query heads together.

    They do so only where all heads share a selection that K, V and queries decide. An algorithm
    that keeps a prompt's queries keeps those of its rank's heads only.
    """
    shared = policy.heads == 1 and not algorithm.query_window
    return shared and all(each.source == "kv" for each in kept.values())
