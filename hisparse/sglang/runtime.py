"""What one scheduler process knows: its sizes, and the hooks that carry them into SGLang."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from hisparse.config import HiSparseConfig, build_algorithm, resolve_memory
from hisparse.engine.build import Plan, Resources, make_plan, stored_spec
from hisparse.engine.coordinator import SparseCoordinator
from hisparse.errors import HiSparseError
from hisparse.memory.host import free_host_memory
from hisparse.sglang import checks, compat
from hisparse.sglang.foresight import foreseen_layers
from hisparse.sglang.model_shape import read_model_shape

if TYPE_CHECKING:
    from hisparse.sglang.metrics import MetricsReporter

__all__ = ["Session", "session"]

logger = logging.getLogger("hisparse")


@dataclass(kw_only=True)
class Session(Plan):
    """Decisions of one rank, made once the model is loaded and before the pools are built.

    Attributes:
        slots_cpu: request slots of the forward that is being prepared, ``[B]`` on the host.
        unfinished: request id whose prompt goes on after that forward.
    """

    slots_cpu: torch.Tensor | None = None
    unfinished: str | None = None
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
    # What SGLang divides by: it knows nothing of eight bits and scales.
    plain = replace(_session.spec, dtype=configurator.kv_cache_dtype, fp8=False)
    return _session.sizing.kv_tokens * plain.token_bytes


def _plan(configurator: Any, device_bytes: int) -> Session:
    config = checks.read_config(configurator.server_args)
    dtype = configurator.kv_cache_dtype
    if dtype == torch.float8_e4m3fn:
        # The model's files ask for it.
        config, dtype = replace(config, kv_cache_dtype="fp8_e4m3"), configurator.model_config.dtype
    algorithm = build_algorithm(config)
    spec, scale = read_model_shape(configurator.model, dtype, config.page_size)
    spec = stored_spec(config, spec)
    if config.speculate == "layer":
        foreseen_layers(configurator.model)
    host_bytes, device_bytes = _memory(config, configurator, device_bytes)
    plan = make_plan(
        config,
        algorithm,
        spec,
        scale,
        Resources(
            host_bytes=host_bytes,
            device_bytes=device_bytes,
            context_length=configurator.model_config.context_len,
            max_requests=_requested_rows(),
            device_type=configurator.device,
        ),
    )
    return Session(**vars(plan))


def _memory(config: HiSparseConfig, configurator: Any, profiled: int) -> tuple[int, int]:
    """Bytes of host and of device memory that this rank may take."""
    from sglang.srt.distributed.parallel_state import get_world_group

    args = configurator.server_args
    ranks = max(1, get_world_group().world_size // max(1, args.nnodes))
    free = free_host_memory()
    host = resolve_memory(config.host_memory, free, "host_memory") // ranks
    if configurator.device == "cpu":
        # There is no device: its memory is simulated by host memory that the pools do not take,
        # less a tenth for activations.
        profiled = min(profiled, (free - host * ranks) * 9 // 10 // ranks)
    if config.device_memory is not None:
        profiled = min(profiled, resolve_memory(config.device_memory, profiled, "device_memory"))
    return _least_of_ranks(host, profiled)


def _least_of_ranks(host: int, device: int) -> tuple[int, int]:
    """Every rank must come to the same sizes: what the poorest one has."""
    from sglang.srt.distributed.parallel_state import get_world_group

    if get_world_group().world_size == 1:
        return host, device
    both = torch.tensor([host, device], dtype=torch.int64)
    group = get_world_group().cpu_group
    torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MIN, group=group)
    least_host, least_device = both.tolist()
    return least_host, least_device


def _requested_rows() -> int | None:
    schedule, _ = compat.schedule_and_serving()
    requested: int | None = schedule.max_running_requests
    return requested


def around_resolve_max_num_reqs(
    original: Callable[..., int], configurator: Any, token_capacity: int
) -> int:
    """Lower the number of running requests to what device memory holds."""
    rows = original(configurator, token_capacity)
    return rows if _session is None else min(rows, _session.sizing.max_requests)


def around_get_kv_pool_cls(original: Callable[..., Any], platform: Any, *, kind: str) -> Any:
    """Put the pool in host memory."""
    from hisparse.sglang.kv_pool import POOLS

    if _session is None or kind not in POOLS:
        return original(platform, kind=kind)
    return POOLS[kind]


def around_build_token_to_kv_pool(
    original: Callable[..., Any], configurator: Any, **options: Any
) -> Any:
    """Put the pool in host memory, in releases whose platform is not asked for its class."""
    from sglang.srt.mem_cache import kv_cache_configurator

    from hisparse.sglang.kv_pool import POOLS

    if _session is None:
        return original(configurator, **options)
    stock: Any = {f"{kind.upper()}TokenToKVPool": pool for kind, pool in POOLS.items()}
    with patch.multiple(kv_cache_configurator, **stock):
        return original(configurator, **options)


def around_free_rows(original: Callable[..., None], pool: Any, indices: list[int]) -> None:
    """Requests are over: their device pages go back."""
    original(pool, indices)
    if _session is not None and pool is _session.req_to_token_pool:
        _session.end_requests(indices)


def around_free(original: Callable[..., None], pool: Any, request: Any) -> None:
    """A request is over, in releases that free one row at a time."""
    row = request.req_pool_idx
    original(pool, request)
    if _session is not None and pool is _session.req_to_token_pool:
        _session.end_requests([row])


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
    """Keep what only the scheduler's batch knows: request slots on the host, which reading is no
    sync, and whose prompt goes on after this forward.
    """
    forward_batch = original(cls, batch, *args, **kwargs)
    if _session is not None:
        # Not on the forward's batch: runners copy that and drop fields that they do not know.
        _session.slots_cpu = batch.req_pool_indices_cpu
        _session.unfinished = getattr(batch.chunked_req, "rid", None)
    return forward_batch


def around_compute_max_prefix_len(
    original: Callable[..., int], request: Any, input_len: int
) -> int:
    """Some algorithms look at the last queries of a prompt: the radix cache may not skip them."""
    longest = original(request, input_len)
    if _session is None:
        return longest
    return max(0, min(longest, input_len - _session.algorithm.query_window))
