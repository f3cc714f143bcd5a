"""Hooks of every server: they set pool sizes and report requests to the engine."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from hisparse.cache.formats import format_of
from hisparse.model_config import check_own_selection
from hisparse.sglang import features, install
from hisparse.sglang.install import is_requested
from hisparse.sglang.models import name_of, stand_in
from hisparse.sglang.session import current_session, errors_logged, start_session
from hisparse.sglang.setup import make_session

logger = logging.getLogger("hisparse")


def around_model_specific_adjustments(original: Callable[[Any], None], server_args: Any) -> None:
    """Adjust SGLang's arguments to the model, without its checks of the backend's name.

    For some models (gpt-oss, EXAONE-4, Gemma 4, Llama 4) SGLang asserts that the attention backend
    is one of a list, since some of its own backends lack windows or sinks. hisparse judges a model
    by its layers instead.

    Features that the model needs are on from here.

    Raises:
        ConfigError: hisparse or SGLang does not serve the model with these flags.
    """
    if not is_requested(server_args):
        return original(server_args)
    from sglang.srt.arg_groups.overrides import model_config_of

    model = model_config_of(server_args)
    # Before SGLang chooses a backend of its own for such a model.
    indexer = features.indexer_of(model)
    served = indexer.fields if indexer else frozenset()
    check_own_selection(name_of(model), model.hf_config, model.hf_text_config, served=served)
    needed = features.for_model(model, name_of(model))
    features.enable(dict.fromkeys([*features.enabled(), *needed]))
    for feature in needed:
        install.install(feature.hooks)
    with ExitStack() as stack:
        for feature in needed:
            stack.enter_context(feature.adjusting(server_args))
        stack.enter_context(stand_in("triton"))
        return original(server_args)


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
        session, draft_bytes = make_session(configurator, device_bytes)
    start_session(session)
    logger.info("hisparse: %s", session.setup.sizing.describe())
    # SGLang divides by its own bytes per token, whatever format hisparse stores.
    setup, dtype = session.setup, configurator.kv_cache_dtype
    sglang_spec = replace(setup.spec, dtype=dtype, kv_cache_dtype="auto")
    return setup.sizing.kv_tokens * (format_of(sglang_spec).token_bytes + draft_bytes)


def _around_resolve_max_num_reqs(
    original: Callable[..., int], configurator: Any, token_capacity: int
) -> int:
    """Limit the number of running requests to what device memory holds."""
    session = current_session()
    rows = original(configurator, token_capacity)
    if session is None:
        return rows
    return min(rows, session.setup.sizing.max_requests - session.request_slots)


def around_get_kv_pool_cls(original: Callable[..., Any], platform: Any, *, kind: str) -> Any:
    """Use a KV pool in host memory, and for a draft model SGLang's own on the device."""
    session = current_session()
    if session is None:
        return original(platform, kind=kind)
    from hisparse.sglang.kv_pool import POOLS

    enabled, is_draft = features.enabled(), session.pool is not None
    found = [x for f in enabled if (x := f.pool_class(kind, is_draft=is_draft))]
    if not is_draft:
        found += [POOLS[kind]] if kind in POOLS else []
    if not found:
        return original(platform, kind=kind)
    mixins = [] if is_draft else [x for f in enabled if (x := f.pool_mixin(kind))]
    return type(found[0].__name__, (*mixins, found[0]), {}) if mixins else found[0]


def _around_free_rows(original: Callable[..., None], pool: Any, indices: list[int]) -> None:
    """End requests when SGLang frees their slots: their device pages become free."""
    session = current_session()
    original(pool, indices)
    if session is not None and pool is session.req_to_token_pool:
        session.end_requests(indices)


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
        session.coordinator.on_pages_replaced(slot)


def _around_enable_fused_set_kv_buffer(original: Callable[..., bool], *args: Any) -> bool:
    """Stop models from writing K/V directly into the pool: the backend has to see new tokens."""
    session = current_session()
    return False if session is not None else original(*args)


def around_init_new(
    original: Callable[..., Any], cls: type, batch: Any, model_runner: Any, **kwargs: Any
) -> Any:
    """Keep in the session what only the scheduler's batch has.

    These are the requests, how many of them decode in a mixed batch, their slots on the host, which
    the backend reads without a device sync, and the request whose prompt continues after this
    forward.
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


#: Wrappers by the dotted name of the function.
HOOKS: dict[str, Callable[..., Any]] = {
    "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments": (
        around_model_specific_adjustments
    ),
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes": (
        around_profile_available_bytes
    ),
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs": (
        _around_resolve_max_num_reqs
    ),
    "sglang.srt.platforms.interface.SRTPlatform.get_kv_pool_cls": around_get_kv_pool_cls,
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free_rows": _around_free_rows,
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.write": around_write,
    "sglang.srt.models.utils.enable_fused_set_kv_buffer": _around_enable_fused_set_kv_buffer,
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": around_init_new,
}
