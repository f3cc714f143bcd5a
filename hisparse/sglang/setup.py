"""Sizes the engine of one SGLang rank and builds it on top of SGLang's pools."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hisparse.cache.formats import sglang_choices
from hisparse.config import HiSparseConfig
from hisparse.engine.build import Resources, build_engine, resolve
from hisparse.engine.capabilities import check_dense_layers, stored_spec
from hisparse.engine.coordinator import SparseCoordinator
from hisparse.engine.fingerprint import model_settings
from hisparse.kernels.device_limits import device_limits
from hisparse.memory.host import free_host_memory
from hisparse.memory.sizing import resize
from hisparse.sglang.features.disaggregation import config_of_server, decode_extra_slots
from hisparse.sglang.features.hybrids import attention_pool, check_attending, hybrid_layers
from hisparse.sglang.features.speculation import check_rollback, draft_tokens
from hisparse.sglang.features.speculation.draft_model import draft_token_bytes
from hisparse.sglang.features.storage.counters import StorageCounters
from hisparse.sglang.features.storage.key import AdapterKeys
from hisparse.sglang.features.storage.setup import has_linker
from hisparse.sglang.model_shape import read_model_shape
from hisparse.sglang.ranks import (
    attention_replicas,
    gather_queries,
    latent_ranks,
    layer_share,
    least_of_ranks,
    num_replicas,
    pipeline_size,
)
from hisparse.sglang.server_args import read_config
from hisparse.sglang.session import Session
from hisparse.types import KVSpec
from hisparse.units import parse_memory, resolve_memory

__all__ = ["build_coordinator", "make_session"]

logger = logging.getLogger("hisparse")


def make_session(configurator: Any, device_bytes: int) -> Session:
    """Size the engine of this rank.

    Args:
        configurator: SGLang's ``KVCacheConfigurator``, after the model is loaded.
        device_bytes: device memory that SGLang profiled for the KV cache.

    Raises:
        HiSparseError: the model, a setting or a size is not supported.
    """
    config = read_config(configurator.server_args)
    dtype = configurator.kv_cache_dtype
    for name, quantized in sglang_choices().items():
        if dtype == quantized:
            # The model's own configuration requests such a KV cache.
            config, dtype = replace(config, kv_cache_dtype=name), configurator.model_config.dtype
    config = config_of_server(config, configurator.server_args)
    context_length = configurator.model_config.context_len
    model, hybrid = configurator.model, hybrid_layers(configurator.model_config)
    shape = read_model_shape(model, dtype, config.page_size, context_length, hybrid)
    spec = stored_spec(config, shape.spec)
    _log_choices(config, spec, configurator.device)
    is_pipeline = pipeline_size() > 1
    layers: Sequence[int] | None = None
    if is_pipeline:
        layers = _own_layers(config, spec, configurator)
    elif hybrid is not None:
        layers = shape.layer_ids
        check_attending(config, shape.layer_ids)
    ranks = latent_ranks(configurator.server_args.nnodes)
    host_bytes, device_bytes = _memory(config, configurator, device_bytes, spec.num_layers)
    drafts = draft_tokens(configurator.server_args)
    setup = resolve(
        config,
        spec,
        shape.scale,
        Resources(
            host_bytes=host_bytes,
            device_bytes=device_bytes,
            # Drafts can go beyond the end of a context.
            context_length=context_length + drafts,
            max_requests=_max_requests(),
            device_type=configurator.device,
            device=device_limits(configurator.device),
            node_ranks=ranks.size,
            chunk_tokens=_chunk_tokens(configurator),
            draft_token_bytes=draft_token_bytes(configurator),
        ),
        layers,
    )
    if drafts:
        check_rollback(setup, configurator.server_args.speculative_algorithm)
    if is_pipeline:
        # Ranks with fewer layers have room for more.
        tokens, requests = least_of_ranks(setup.sizing.kv_tokens, setup.sizing.max_requests)
        setup.sizing = resize(setup.sizing, kv_tokens=tokens, max_requests=requests)
    session = Session(**vars(setup), layer_ids=shape.layer_ids, ranks=ranks)
    session.extra_slots = decode_extra_slots()
    if has_linker(configurator.server_args):
        _add_storage(session, configurator)
    return session


def _add_storage(session: Session, configurator: Any) -> None:
    """Add what a store below host memory needs."""
    session.storage = StorageCounters()
    session.model = configurator.model
    session.model_config = configurator.model_config.hf_config
    overrides = json.loads(configurator.server_args.json_model_override_args or "{}")
    session.model_settings = model_settings(session.model_config, overrides)


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
    reason = config.not_captured(device)
    if reason is not None:
        logger.info("hisparse: decode steps are not captured in CUDA graphs: %s", reason)


def _own_layers(config: HiSparseConfig, spec: KVSpec, configurator: Any) -> range:
    """The model's numbers of the layers of this rank of a pipeline."""
    layers = configurator.model_config.num_hidden_layers
    check_dense_layers(config, replace(spec, num_layers=layers, windows=()))
    first = configurator.layer_info.start_layer
    return range(first, first + spec.num_layers)


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
    """Bytes of host and of device memory that this rank may use, with so many layers of its own."""
    free, replicas = free_host_memory(), num_replicas()
    own, of_node = layer_share(num_layers, configurator.server_args.nnodes)
    wanted = config.host_memory
    if replicas > 1:
        # Other replicas may have taken theirs already, so the server has made bytes of fractions.
        wanted = int(parse_memory("host_memory", wanted)) // replicas
    host = resolve_memory(wanted, free, "host_memory")
    if configurator.device == "cpu":
        # Without a GPU, host memory stands in for device memory: what the pools leave free, less
        # a tenth for activations.
        left = max(0, free - host * replicas)
        profiled = min(profiled, left * 9 // 10 * own // of_node)
    if config.device_memory is not None:
        profiled = min(profiled, resolve_memory(config.device_memory, profiled, "device_memory"))
    host, profiled = least_of_ranks(host, profiled)
    return host * replicas * own // of_node, profiled


def _max_requests() -> int | None:
    """The most requests of this rank that may have a slot; None: no limit is given."""
    from sglang.srt.runtime_context import get_schedule

    running: int | None = get_schedule().max_running_requests
    if running is None:
        return None
    return max(1, running // attention_replicas()) + decode_extra_slots()


def build_coordinator(session: Session, model_runner: Any) -> SparseCoordinator:
    """Build the engine on SGLang's pools and allocate its device memory.

    Args:
        session: this rank's session; its sizes are lowered to those of the pools.
        model_runner: SGLang's ``ModelRunner``, after it built the pools.
    """
    if session.storage is not None:
        session.adapter_key = AdapterKeys(model_runner.lora_manager).key
    pool, rows = attention_pool(model_runner.token_to_kv_pool), model_runner.req_to_token_pool
    # --max-total-tokens and --max-running-requests may have lowered the sizes. Slot 0 is padding.
    num_slots = rows.req_to_token.shape[0]
    session.sizing = resize(session.sizing, kv_tokens=pool.size, max_requests=num_slots - 1)
    logger.info("hisparse: %s", session.sizing.describe())
    return build_engine(
        session,
        pool.host,
        num_slots=num_slots,
        device=torch.device(model_runner.device),
        gather_queries=None if session.ranks is None else gather_queries(),
    )
