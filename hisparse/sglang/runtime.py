"""What one scheduler process knows: its sizes, and the hooks that carry them into SGLang."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch

from hisparse import sizing as sizing_formula
from hisparse.adapters import ADAPTERS
from hisparse.algorithms import BaseSparseAlgorithm
from hisparse.config import HiSparseConfig, build_algorithm, resolve_memory
from hisparse.coordinator import SparseCoordinator
from hisparse.errors import ConfigError, HiSparseError
from hisparse.sglang import checks
from hisparse.sglang.model_shape import read_model_shape
from hisparse.sizing import Sizing, SizingRequest
from hisparse.types import HostLayout, KVSpec, SelectionScope

if TYPE_CHECKING:
    from hisparse.sglang.metrics import MetricsReporter

__all__ = ["Session", "session"]

logger = logging.getLogger("hisparse")


@dataclass(kw_only=True)
class Session:
    """Decisions of one rank, made once the model is loaded and before the pools are built."""

    config: HiSparseConfig
    algorithm: BaseSparseAlgorithm
    spec: KVSpec
    scale: float
    scope: SelectionScope
    layout: HostLayout
    sizing: Sizing
    req_to_token_pool: Any = None
    coordinator: SparseCoordinator | None = None
    metrics: MetricsReporter | None = None

    def end_requests(self, slots: Iterable[int]) -> None:
        """The requests in these slots are over."""
        assert self.coordinator is not None
        assert self.metrics is not None
        for slot in slots:
            self.coordinator.on_request_end(slot)
        self.metrics.report(now=True)


_session: Session | None = None


def session() -> Session:
    """This process's session; an error before the pools are sized."""
    if _session is None:
        raise HiSparseError("the KV pool was built before its size was known")
    return _session


def around_profile_available_bytes(
    original: Callable[..., int], configurator: Any, pre_model_load_memory: int
) -> int:
    """Host capacity in place of device capacity: the bytes that size SGLang's pool."""
    global _session
    device_bytes = original(configurator, pre_model_load_memory)
    if not checks.is_requested(configurator.server_args):
        return device_bytes
    try:
        _session = _plan(configurator, device_bytes)
    except HiSparseError as error:
        logger.error("hisparse: error: %s", error)
        raise
    logger.info("hisparse: %s", _session.sizing.describe())
    return _session.sizing.kv_tokens * _session.spec.token_bytes


def _plan(configurator: Any, device_bytes: int) -> Session:
    config = HiSparseConfig.parse(configurator.server_args.hisparse_config)
    algorithm = build_algorithm(config)
    spec, scale = read_model_shape(
        configurator.model, configurator.kv_cache_dtype, config.page_size
    )
    scope = _choose_scope(config, algorithm)
    layout: HostLayout = config.host_layout or ("layer_first" if scope == "layer" else "page_head")
    heads = spec.selection_heads(scope)
    host_bytes, device_bytes = _memory(config, configurator, device_bytes)
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
            context_length=configurator.model_config.context_len,
            max_requests=_requested_rows(),
        )
    )
    bad = sorted(x for x in config.dense_layers or () if x >= spec.num_layers)
    if bad:
        raise ConfigError(
            f"dense_layers names {bad}; the model has layers 0 to {spec.num_layers - 1}"
        )
    return Session(
        config=config,
        algorithm=algorithm,
        spec=spec,
        scale=scale,
        scope=scope,
        layout=layout,
        sizing=sizing,
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


def _memory(config: HiSparseConfig, configurator: Any, profiled: int) -> tuple[int, int]:
    """Bytes of host and of device memory that this rank may take."""
    from sglang.srt.runtime_context import get_parallel

    args = configurator.server_args
    ranks = max(1, get_parallel().launch_world_size // max(1, args.nnodes))
    free = psutil.virtual_memory().available
    host = resolve_memory(config.host_memory, free, "host_memory") // ranks
    if configurator.device == "cpu":
        # There is no device: its memory is simulated by host memory that the pool does not take.
        profiled = min(profiled, free - host * ranks)
    if config.device_memory is not None:
        profiled = min(profiled, resolve_memory(config.device_memory, profiled, "device_memory"))
    return _least_of_ranks(host, profiled)


def _least_of_ranks(host: int, device: int) -> tuple[int, int]:
    """Every rank must come to the same sizes: what the poorest one has."""
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().launch_world_size == 1:
        return host, device
    both = torch.tensor([host, device], dtype=torch.int64)
    group = get_parallel().world_group.cpu_group
    torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MIN, group=group)
    least_host, least_device = both.tolist()
    return least_host, least_device


def _requested_rows() -> int | None:
    from sglang.srt.runtime_context import get_schedule

    requested: int | None = get_schedule().max_running_requests
    return requested


def _default_staging_bytes(spec: KVSpec, device_bytes: int) -> int:
    """A tile of 8,192 tokens, or a sixteenth of the device memory where that is less."""
    return min(8192 * spec.token_bytes_per_layer, device_bytes // 16)


def around_resolve_max_num_reqs(
    original: Callable[..., int], configurator: Any, token_capacity: int
) -> int:
    """Lower the number of running requests to what device memory holds."""
    rows = original(configurator, token_capacity)
    return rows if _session is None else min(rows, _session.sizing.max_requests)


def around_get_kv_pool_cls(original: Callable[..., Any], platform: Any, *, kind: str) -> Any:
    """Put the pool in host memory."""
    if _session is None or kind != "mha":
        return original(platform, kind=kind)
    from hisparse.sglang.kv_pool import HiSparseMHAPool

    return HiSparseMHAPool


def around_free_rows(original: Callable[..., None], pool: Any, indices: list[int]) -> None:
    """Requests are over: their device pages go back."""
    original(pool, indices)
    if _session is not None and pool is _session.req_to_token_pool:
        _session.end_requests(indices)


def around_flush_cache(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The radix cache gave its host slots back: show it."""
    flushed = original(*args, **kwargs)
    if _session is not None and _session.metrics is not None:
        _session.metrics.report(now=True)
    return flushed


def around_enable_fused_set_kv_buffer(original: Callable[..., bool], *args: Any) -> bool:
    """Some models write K/V straight into the pool; new tokens must pass through the backend."""
    return False if _session is not None else original(*args)


def around_init_new(
    original: Callable[..., Any], cls: type, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Let decode batches keep the request slots on the host, so that reading them is no sync."""
    forward_batch = original(cls, batch, *args, **kwargs)
    if _session is not None and forward_batch.req_pool_indices_cpu is None:
        forward_batch.req_pool_indices_cpu = batch.req_pool_indices_cpu
    return forward_batch
