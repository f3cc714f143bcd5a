"""Functions that wrap SGLang's own: they carry the sizes in, and tell the engine of requests."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from hisparse.errors import HiSparseError
from hisparse.sglang import checks, setup
from hisparse.sglang import session as sessions

__all__ = [
    "around_build_token_to_kv_pool",
    "around_compute_max_prefix_len",
    "around_enable_fused_set_kv_buffer",
    "around_flush_cache",
    "around_free",
    "around_free_rows",
    "around_get_kv_pool_cls",
    "around_init_new",
    "around_profile_available_bytes",
    "around_resolve_max_num_reqs",
]

logger = logging.getLogger("hisparse")


def around_profile_available_bytes(
    original: Callable[..., int], configurator: Any, pre_model_load_memory: int
) -> int:
    """Host capacity in place of device capacity: the bytes that size SGLang's pool."""
    device_bytes = original(configurator, pre_model_load_memory)
    if not checks.is_requested(configurator.server_args):
        return device_bytes
    try:
        session = setup.make_session(configurator, device_bytes)
    except HiSparseError as error:
        logger.error("hisparse: error: %s", error)
        raise
    sessions.start(session)
    logger.info("hisparse: %s", session.sizing.describe())
    # SGLang divides by its own bytes per token, which know nothing of eight bits and scales.
    plain = replace(session.spec, dtype=configurator.kv_cache_dtype, fp8=False)
    return session.sizing.kv_tokens * plain.token_bytes


def around_resolve_max_num_reqs(
    original: Callable[..., int], configurator: Any, token_capacity: int
) -> int:
    """Lower the number of running requests to what device memory holds."""
    session = sessions.current()
    rows = original(configurator, token_capacity)
    return rows if session is None else min(rows, session.sizing.max_requests)


def around_get_kv_pool_cls(original: Callable[..., Any], platform: Any, *, kind: str) -> Any:
    """Put the pool in host memory."""
    from hisparse.sglang.kv_pool import POOLS

    session = sessions.current()
    if session is None or kind not in POOLS:
        return original(platform, kind=kind)
    return POOLS[kind]


def around_build_token_to_kv_pool(
    original: Callable[..., Any], configurator: Any, **options: Any
) -> Any:
    """Put the pool in host memory, in releases whose platform is not asked for its class."""
    from sglang.srt.mem_cache import kv_cache_configurator

    from hisparse.sglang.kv_pool import POOLS

    session = sessions.current()
    if session is None:
        return original(configurator, **options)
    stock: Any = {f"{kind.upper()}TokenToKVPool": pool for kind, pool in POOLS.items()}
    with patch.multiple(kv_cache_configurator, **stock):
        return original(configurator, **options)


def around_free_rows(original: Callable[..., None], pool: Any, indices: list[int]) -> None:
    """Requests are over: their device pages go back."""
    session = sessions.current()
    original(pool, indices)
    if session is not None and pool is session.req_to_token_pool:
        session.end_requests(indices)


def around_free(original: Callable[..., None], pool: Any, request: Any) -> None:
    """A request is over, in releases that free one row at a time."""
    session = sessions.current()
    row = request.req_pool_idx
    original(pool, request)
    if session is not None and pool is session.req_to_token_pool:
        session.end_requests([row])


def around_flush_cache(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The radix cache gave its host slots back: show it."""
    session = sessions.current()
    flushed = original(*args, **kwargs)
    if session is not None:
        session.report()
    return flushed


def around_enable_fused_set_kv_buffer(original: Callable[..., bool], *args: Any) -> bool:
    """Some models write K/V straight into the pool; new tokens must pass through the backend."""
    session = sessions.current()
    return False if session is not None else original(*args)


def around_init_new(
    original: Callable[..., Any], cls: type, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Keep what only the scheduler's batch knows: request slots on the host, which reading is no
    sync, and whose prompt goes on after this forward.
    """
    session = sessions.current()
    forward_batch = original(cls, batch, *args, **kwargs)
    if session is not None:
        # Not on the forward's batch: runners copy that and drop fields that they do not know.
        session.slots_cpu = batch.req_pool_indices_cpu
        session.unfinished = getattr(batch.chunked_req, "rid", None)
    return forward_batch


def around_compute_max_prefix_len(
    original: Callable[..., int], request: Any, input_len: int
) -> int:
    """Some algorithms look at the last queries of a prompt: the radix cache may not skip them."""
    session = sessions.current()
    longest = original(request, input_len)
    if session is None:
        return longest
    return max(0, min(longest, input_len - session.algorithm.query_window))
