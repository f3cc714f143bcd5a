"""Wrappers of SGLang functions: they set pool sizes and report requests to the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hisparse.errors import AlgorithmError, CapacityError, one_line
from hisparse.sglang.features.speculation.draft_model import sglang_draft_bytes
from hisparse.sglang.requested import is_requested
from hisparse.sglang.session import current_session, errors_logged, start_session
from hisparse.sglang.setup import make_session
from hisparse.units import format_bytes

__all__ = [
    "around_can_run_graph",
    "around_capture",
    "around_compute_max_prefix_len",
    "around_enable_fused_set_kv_buffer",
    "around_flush_cache",
    "around_free",
    "around_free_rows",
    "around_get_kv_pool_cls",
    "around_init_new",
    "around_profile_available_bytes",
    "around_release_req",
    "around_request",
    "around_resolve_max_num_reqs",
    "around_run_eagle_verify",
    "around_select_runners",
    "around_write",
]

logger = logging.getLogger("hisparse")


def around_profile_available_bytes(
    original: Callable[..., int], configurator: Any, pre_model_load_memory: int
) -> int:
    """Return host capacity instead of device capacity: the bytes from which SGLang sizes its pool.

    Also decides the sizes of this rank and starts its session.
    """
    device_bytes = original(configurator, pre_model_load_memory)
    if not is_requested(configurator.server_args):
        return device_bytes
    with errors_logged():
        session = make_session(configurator, device_bytes)
    start_session(session)
    logger.info("hisparse: %s", session.sizing.describe())
    # SGLang divides by its own bytes per token, whatever format hisparse stores.
    sglang_spec = replace(session.spec, dtype=configurator.kv_cache_dtype, kv_cache_dtype="auto")
    token_bytes = sglang_spec.token_bytes + sglang_draft_bytes(configurator, sglang_spec)
    return session.sizing.kv_tokens * token_bytes


def around_resolve_max_num_reqs(
    original: Callable[..., int], configurator: Any, token_capacity: int
) -> int:
    """Limit the number of running requests to what device memory holds."""
    session = current_session()
    rows = original(configurator, token_capacity)
    if session is None:
        return rows
    most = session.sizing.max_requests - session.extra_slots
    if most < 1:
        with errors_logged():
            raise CapacityError(
                f"--disaggregation-decode-extra-slots is {session.extra_slots}, and the device "
                f"holds {session.sizing.max_requests} requests; expected fewer extra slots"
            )
    return min(rows, most)


def around_get_kv_pool_cls(original: Callable[..., Any], platform: Any, *, kind: str) -> Any:
    """Use a KV pool in host memory, and for a draft model SGLang's own on the device."""
    from hisparse.sglang.kv_pool import POOLS, DraftDSAPool

    session = current_session()
    if session is None or kind not in POOLS:
        return original(platform, kind=kind)
    if session.has_pool:
        return DraftDSAPool if kind == "dsa" else original(platform, kind=kind)
    return POOLS[kind]


def around_free_rows(original: Callable[..., None], pool: Any, indices: list[int]) -> None:
    """End requests when SGLang frees their slots: their device pages become free."""
    session = current_session()
    original(pool, indices)
    if session is not None and pool is session.req_to_token_pool:
        session.end_requests(indices)


def around_free(original: Callable[..., None], pool: Any, request: Any) -> None:
    """End a request of a decode server, whose pool frees one slot at a time."""
    session = current_session()
    slot = request.kv.req_pool_idx
    original(pool, request)
    if session is not None and pool is session.req_to_token_pool:
        session.end_requests([slot])


def around_request(original: Callable[..., None], request: Any, *args: Any, **options: Any) -> None:
    """Let the key of a request's pages name its LoRA adapter by content, not by SGLang's id.

    What a client gives as ``extra_key`` is marked, so that it cannot name an adapter.
    """
    original(request, *args, **options)
    session, lora_id = current_session(), request.lora_id
    if session is None or session.adapter_key is None or request.extra_key is None:
        return
    given = request.extra_key.removesuffix(lora_id or "")
    adapter = "" if lora_id is None else f"adapter {session.adapter_key(lora_id)} "
    request.extra_key = adapter + (f"client {given}" if given else "")


def around_release_req(
    original: Callable[..., bool], *, req: Any, offload_kv: bool = True, **others: Any
) -> bool:
    """Offer the pages of a retracted request to the storage, before SGLang frees them.

    SGLang clears ``offload_kv`` for a request that does not come back, or that it pauses while
    weights change.
    """
    session = current_session()
    if session is not None and offload_kv:
        session.swap_out(req)
    return original(req=req, offload_kv=offload_kv, **others)


def around_write(original: Callable[..., None], pool: Any, indices: Any, values: Any) -> None:
    """Report that a request's host slots may change.

    Once a prompt is computed, the radix cache keeps one copy of the pages that several requests
    have computed, and writes its host slots into the tables of all of them.
    """
    session = current_session()
    original(pool, indices, values)
    slot = indices[0]
    # A decode step writes one slot of each request, with a tensor of request slots.
    if session is not None and pool is session.req_to_token_pool and isinstance(slot, int):
        assert session.coordinator is not None, "the backend is built before requests run"
        session.coordinator.on_pages_replaced(slot)


def around_flush_cache(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Update the metrics after a flush, which frees the radix cache's host slots."""
    session = current_session()
    flushed = original(*args, **kwargs)
    if session is not None:
        session.report_metrics()
    return flushed


def around_select_runners(
    original: Callable[..., list[Any]], updater: Any, selector: str = "all"
) -> list[Any]:
    """Let the storage rest before anything writes to the weights.

    SGLang selects the models for each update, for the beginning and the end of one in several
    requests, and for ``/weights_checker``, which can write random weights.
    """
    session = current_session()
    if session is not None:
        session.note_update(updater)
    return original(updater, selector)


def around_enable_fused_set_kv_buffer(original: Callable[..., bool], *args: Any) -> bool:
    """Stop models from writing K/V directly into the pool: the backend has to see new tokens."""
    session = current_session()
    return False if session is not None else original(*args)


def around_init_new(
    original: Callable[..., Any], cls: type, batch: Any, model_runner: Any, **kwargs: Any
) -> Any:
    """Keep four facts that only the scheduler's batch has.

    The facts are the requests, how many of them decode in a mixed batch, their slots on the host,
    which the backend reads without a device sync, and the request with a prompt that continues
    after this forward.
    """
    session = current_session()
    forward_batch = original(cls, batch, model_runner, **kwargs)
    if session is not None and not model_runner.is_draft_worker:
        # The forward batch cannot hold them: runners copy it and drop unknown fields.
        session.requests = batch.reqs
        # SGLang's runner calls a mixed forward EXTEND before it comes to the backend.
        mixed = forward_batch.forward_mode.is_mixed()
        session.num_decoding = len(batch.decoding_reqs or ()) if mixed else 0
        session.slots_cpu = batch.req_pool_indices_cpu
        session.chunked_request_id = getattr(batch.chunked_req, "rid", None)
    return forward_batch


def around_run_eagle_verify(original: Callable[..., Any], batch: Any, **options: Any) -> Any:
    """Report how many tokens of a draft model's chains are accepted. None of them moves."""
    session = current_session()
    result = original(batch, **options)
    if session is not None:
        session.accept_chains(result.accept_lens)
    return result


def around_can_run_graph(original: Callable[..., bool], runner: Any, forward_batch: Any) -> bool:
    """Let a decode step run eagerly if the captured one cannot serve its requests."""
    session = current_session()
    can_run = original(runner, forward_batch)
    return can_run if session is None else can_run and session.can_replay(forward_batch)


def around_capture(original: Callable[..., None], runner: Any) -> None:
    """Say in one line what to change if a capture of decode steps ends the start."""
    session = current_session()
    try:
        original(runner)
    except (RuntimeError, AlgorithmError) as error:
        # Of PyTorch, of Triton, or of an algorithm that one of them ended.
        if session is not None and "out of memory" in str(error):
            with errors_logged():
                raise CapacityError(
                    f"device_memory: hisparse got {format_bytes(session.sizing.device_bytes)}, and "
                    f"the GPU ran out of memory while SGLang captured decode steps of up to "
                    f"{session.sizing.max_requests} requests; lower device_memory or "
                    f'--max-running-requests, or set "cuda_graph": false ({one_line(error)})'
                ) from error
        if isinstance(error, AlgorithmError):
            logger.error(
                "hisparse: error: %s; the server stops, since it happened while a CUDA graph was "
                "captured",
                error,
            )
        raise


def around_compute_max_prefix_len(
    original: Callable[..., int], request: Any, input_len: int
) -> int:
    """Shorten the radix cache hit so that an algorithm sees the last queries of a prompt."""
    session = current_session()
    max_prefix_len = original(request, input_len)
    if session is None:
        return max_prefix_len
    return max(0, min(max_prefix_len, input_len - session.algorithm.query_window))
