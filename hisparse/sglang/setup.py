"""Sizes the engine of one SGLang rank and builds it on top of SGLang's pools."""

import logging
from typing import Any

import torch

from hisparse.adapters.base import device_limits
from hisparse.cache.formats import sglang_choices
from hisparse.config import HiSparseConfig
from hisparse.engine.build import build_engine, resolve
from hisparse.engine.capabilities import not_captured, stored_spec
from hisparse.engine.coordinator import SparseCoordinator
from hisparse.errors import ConfigError
from hisparse.memory.costs import Resources
from hisparse.memory.host import free_host_memory
from hisparse.sglang import features
from hisparse.sglang.models import hybrid_layers, name_of, read_model_shape
from hisparse.sglang.ranks import (
    attention_replicas,
    gather_queries,
    latent_ranks,
    layer_share,
    least_of_ranks,
    num_replicas,
)
from hisparse.sglang.server_args import session_config
from hisparse.sglang.session import ServerSession
from hisparse.types import KVSpec
from hisparse.units import parse_memory, resolve_memory

logger = logging.getLogger("hisparse")


def make_session(configurator: Any, device_bytes: int) -> tuple[ServerSession, int]:
    """Size the engine of this rank.

    Args:
        configurator: SGLang's ``KVCacheConfigurator``, after the model is loaded.
        device_bytes: device memory that SGLang profiled for the KV cache.

    Returns:
        The session, and what SGLang adds to its bytes of a token of the model.

    Raises:
        HiSparseError: the model, a setting or a size is not supported.
    """
    args, enabled = configurator.server_args, features.enabled()
    dtype, stored = configurator.kv_cache_dtype, "auto"
    for name, quantized in sglang_choices().items():
        if dtype == quantized:
            dtype, stored = configurator.model_config.dtype, name
    config = session_config(args, stored)
    context_length = configurator.model_config.context_len
    hybrid = hybrid_layers(configurator.model_config)
    indexer = features.indexer_of(configurator.model_config)
    text = configurator.model_config.hf_text_config
    shape = read_model_shape(
        *(configurator.model, dtype, config.page_size, context_length, hybrid),
        trained=indexer.trained(text) if indexer else None,
    )
    spec = stored_spec(config, shape.spec)
    _log_choices(config, spec, configurator.device)
    found = (feature.own_layers(config, shape, configurator) for feature in enabled)
    layers = next((x for x in found if x is not None), None)
    ranks = latent_ranks(args.nnodes)
    host_bytes, device_bytes = _memory(config, configurator, device_bytes, spec.num_layers)
    demands = [feature.demand(configurator, shape) for feature in enabled]
    request_slots = sum(x.request_slots for x in demands)
    resources = Resources(
        host_bytes=host_bytes,
        device_bytes=device_bytes,
        context_length=context_length + sum(x.context_tokens for x in demands),
        max_requests=_max_requests(request_slots),
        device_type=configurator.device,
        captures=any(feature.captures_steps for feature in enabled),
        device=device_limits(configurator.device),
        node_ranks=ranks.size,
        chunk_tokens=_chunk_tokens(configurator),
        draft_token_bytes=sum(x.device_token_bytes for x in demands),
    )
    setup = resolve(config, spec, shape.scale, resources, layers)
    session = ServerSession(
        setup=setup, layer_ids=shape.layer_ids, ranks=ranks, request_slots=request_slots
    )
    for feature in enabled:
        feature.sized(session, args)
    for feature in enabled:
        feature.begin(session, configurator)
    return session, sum(x.sglang_token_bytes for x in demands)


def _log_choices(config: HiSparseConfig, spec: KVSpec, device: str) -> None:
    """Log what the model and the device decide, and no setting says."""
    if spec.windows:
        logger.info(
            "hisparse: %d of %d layers attend windows of %s tokens; algorithm %s selects in the "
            "others",
            spec.num_layers - len(spec.full_layers),
            spec.num_layers,
            ", ".join(map(str, sorted(set(spec.windows) - {0}))),
            config.algorithm,
        )
    reason = not_captured(config, device)
    if reason is not None:
        logger.info("hisparse: decode steps are not captured in CUDA graphs: %s", reason)


def _chunk_tokens(configurator: Any) -> int:
    """The most tokens of a prefill on a GPU; 0 on a CPU, where host memory has room for them."""
    args = configurator.server_args
    if configurator.device == "cpu":
        return 0
    chunk = args.chunked_prefill_size
    return int(chunk if chunk is not None and chunk > 0 else args.max_prefill_tokens)


def _memory(
    config: HiSparseConfig, configurator: Any, profiled: int, num_layers: int
) -> tuple[int, int]:
    """Bytes of host and of device memory that this rank may use; ``num_layers`` is its part."""
    free, replicas = free_host_memory(), num_replicas()
    own, of_node = layer_share(num_layers, configurator.server_args.nnodes)
    wanted = config.host_memory
    if replicas > 1:
        # Other replicas may have taken theirs already, so the server has made bytes of fractions.
        wanted = int(parse_memory("host_memory", wanted)) // replicas
    host = resolve_memory(wanted, free, "host_memory")
    if configurator.device == "cpu":
        # Without a GPU, device memory is the host memory that the pools leave free, less a tenth
        # for activations.
        left = max(0, free - host * replicas)
        profiled = min(profiled, left * 9 // 10 * own // of_node)
    if config.device_memory is not None:
        profiled = min(profiled, resolve_memory(config.device_memory, profiled, "device_memory"))
    host, profiled = least_of_ranks(host, profiled)
    return host * replicas * own // of_node, profiled


def _max_requests(request_slots: int) -> int | None:
    """The most requests of this rank that may have a slot; None: no limit is given."""
    from sglang.srt.runtime_context import get_schedule

    running: int | None = get_schedule().max_running_requests
    if running is None:
        return None
    return max(1, running // attention_replicas()) + request_slots


def build_coordinator(session: ServerSession, model_runner: Any) -> SparseCoordinator:
    """Build the engine on SGLang's pools and allocate its device memory.

    Args:
        session: this rank's session; its sizes are lowered to those of the pools.
        model_runner: SGLang's ``ModelRunner``, after it built the pools.
    """
    pool, rows = session.pool, model_runner.req_to_token_pool
    found = model_runner.token_to_kv_pool
    # The pool of a hybrid is part of one that also has the states of its other layers.
    if getattr(found, "full_kv_pool", found) is not pool:
        raise ConfigError(
            f"SGLang keeps the K and V of {name_of(model_runner.model_config)} in "
            f"{type(found).__name__}; expected a model with one pool of K and V"
        )
    # --max-total-tokens and --max-running-requests may have lowered the sizes. Slot 0 is padding.
    num_slots = rows.req_to_token.shape[0]
    session.resize(pool.size, num_slots - 1)
    logger.info("hisparse: %s", session.setup.sizing.describe())
    return build_engine(
        session.setup,
        pool.host,
        device=torch.device(model_runner.device),
        gather_queries=None if session.ranks is None else gather_queries(pool.host.format),
    )
