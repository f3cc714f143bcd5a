"""Prefill and decode servers: flags, and the hooks through which requests arrive.

K and V arrive in the decode server's host pool. Its scheduler starts an arrived request without a
forward (``ForwardMode.PREBUILT``), so the first decode step makes the request ready.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from hisparse.algorithms import ALGORITHMS
from hisparse.config import HiSparseConfig
from hisparse.sglang.features.disaggregation.transfer import scale_buffers
from hisparse.sglang.session import current_session

__all__ = [
    "around_prepare_for_prebuilt",
    "around_setup_state_kv_args",
    "around_try_ensure_parallel_info",
    "config_of_server",
    "decode_extra_slots",
    "decodes_only",
    "is_disaggregated",
    "prepare_disaggregation",
]

logger = logging.getLogger("hisparse")

#: Keeps no representations.
_KEEPS_NOTHING = "streaming"


def is_disaggregated(server_args: Any) -> bool:
    """Whether the server only prefills or only decodes."""
    return server_args.disaggregation_mode in ("prefill", "decode")


def decodes_only() -> bool:
    """Whether the server of this process gets its requests prefilled from another one."""
    from sglang.srt.runtime_context import get_disagg

    mode: str = get_disagg().disaggregation_mode
    return mode == "decode"


def decode_extra_slots() -> int:
    """Request slots of a decode server for requests that are on their way."""
    from sglang.srt.runtime_context import get_disagg

    return (get_disagg().disaggregation_decode_extra_slots or 0) if decodes_only() else 0


def prepare_disaggregation(server_args: Any, device_type: str) -> None:
    """Set the flags of prefill and decode servers that the command line does not give."""
    mode = server_args.disaggregation_mode
    if mode == "decode" and server_args.disaggregation_decode_retraction_backup is None:
        # SGLang would else allocate a second pool in host memory, as large as its device pool.
        server_args.disaggregation_decode_retraction_backup = "cpu_tensor"
    if mode == "prefill" and device_type == "cpu":
        # SGLang would else make a CUDA event, in the overlapped loop for a cached prefix, and for
        # indices in page-locked memory unless all context-parallel ranks send; here that is one.
        server_args.disable_overlap_schedule = True
        os.environ.setdefault("SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER", "1")


def config_of_server(config: HiSparseConfig, server_args: Any) -> HiSparseConfig:
    """The configuration of a server that only prefills or only decodes; else as given.

    A prefill server never decodes, so no algorithm selects there and no representations are kept.
    An indexer's keys are kept: they move, and prompts are attended as the indexer selects.
    """
    if not is_disaggregated(server_args):
        return config
    config = replace(config, host_layout="layer_first")
    if server_args.disaggregation_mode == "decode":
        return config
    config = replace(config, extensions={})
    if ALGORITHMS.get(config.algorithm).indexer:
        return config
    return replace(
        config, algorithm=_KEEPS_NOTHING, algorithm_config={}, selection_scope=None, reuse_layers=1
    )


def around_prepare_for_prebuilt(original: Callable[..., None], batch: Any) -> None:
    """Begin the requests of a batch whose K and V have arrived, or were restored."""
    original(batch)
    session = current_session()
    if session is not None:
        slots, lengths = batch.req_pool_indices_cpu.tolist(), batch.seq_lens_cpu.tolist()
        for slot, start, length in zip(slots, batch.prefix_lens, lengths, strict=True):
            session.arrive(slot, start, length)


def around_setup_state_kv_args(
    original: Callable[..., None], kv_args: Any, token_to_kv_pool: Any, *args: Any, **kwargs: Any
) -> None:
    """Describe the scales of eight bits, which move beside K and V.

    They and an indexer's keys have formats of hisparse's own. The name of the dtype says so: SGLang
    refuses a pair of servers with different names.
    """
    from sglang.srt.disaggregation.base.conn import StateType
    from sglang.srt.disaggregation.utils import append_state_component

    original(kv_args, token_to_kv_pool, *args, **kwargs)
    session = current_session()
    if session is None:
        return
    assert session.coordinator is not None, "the backend is built before the queues"
    host, tokens = token_to_kv_pool.host, token_to_kv_pool.page_size
    size, entries = host.kv.page_size, session.coordinator.stored_entries()
    kinds = [f"{name} {entries[name].dtype}" for name in sorted(entries)]
    if host.format.encoded:
        kinds.append(f"{host.kv.kv_cache_dtype} in pages of {size} tokens")
    if host.format.num_scales:
        first = token_to_kv_pool.start_layer
        append_state_component(
            kv_args,
            StateType.BLOCK_SCALE,
            *scale_buffers(host, tokens),
            # SGLang would else take them for keys and then values.
            layer_ids=list(range(first, first + host.kv.num_layers)),
        )
    if kinds:
        kv_args.kv_cache_dtype_str = " ".join(["hisparse", *kinds])


def around_try_ensure_parallel_info(
    original: Callable[..., bool], manager: Any, bootstrap_addr: str
) -> bool:
    """Refuse the requests of a prefill server that does not fit; SGLang would end this server.

    SGLang asks again for some seconds, then the requests end with an error. A prefill server that
    is started again with fitting flags is taken.
    """
    try:
        return original(manager, bootstrap_addr)
    except RuntimeError as error:
        if current_session() is None:
            raise
        _log_misfit(bootstrap_addr, str(error))
        return False


@cache
def _log_misfit(bootstrap_addr: str, reason: str) -> None:
    """Log once, however often SGLang asks."""
    logger.error(
        "hisparse: error: the prefill server at %s does not fit this server: %s; its requests end "
        "with an error",
        bootstrap_addr,
        reason.rstrip("."),
    )
