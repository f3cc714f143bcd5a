"""Prefill and decode servers: flags, and the hooks through which requests arrive.

K and V arrive in the decode server's host pool. Its scheduler starts an arrived request without a
forward (``ForwardMode.PREBUILT``), so the first decode step makes the request ready.
"""

import logging
import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

import torch

from hisparse.algorithms import ALGORITHMS
from hisparse.engine.received import TransferredRequests
from hisparse.errors import CapacityError
from hisparse.sglang.features.base import (
    ATTENTION_REPLICAS,
    DECODE,
    OTHER_LAYOUT,
    PIPELINE,
    PREFILL_OR_DECODE,
    PROMPT_QUERIES,
    RANKS,
    REPLICAS,
    SPECULATION,
    STORAGE,
    Demand,
    Feature,
    Flag,
    Start,
)
from hisparse.sglang.features.disaggregation.transfer import (
    Buffers,
    IndexerTransfers,
    Transfers,
    entry_buffers,
    scale_buffers,
)
from hisparse.sglang.hooks import around_write
from hisparse.sglang.models import ModelShape
from hisparse.sglang.session import ServerSession, current_session, current_state

logger = logging.getLogger("hisparse")

#: Settings of an algorithm that keeps no representations.
_SELECTS_NOTHING: Final[dict[str, Any]] = {
    "algorithm": "streaming",
    "algorithm_config": {},
    "selection_scope": None,
    "reuse_layers": 1,
}


def _decodes_only() -> bool:
    """Whether the server of this process gets its requests prefilled from another one."""
    from sglang.srt.runtime_context import get_disagg

    mode: str = get_disagg().disaggregation_mode
    return mode == "decode"


def _extra_slots() -> int:
    """Request slots of a decode server for requests that are on their way."""
    from sglang.srt.runtime_context import get_disagg

    return (get_disagg().disaggregation_decode_extra_slots or 0) if _decodes_only() else 0


def _around_prepare_for_prebuilt(original: Callable[..., None], batch: Any) -> None:
    """Begin the requests of a batch whose K and V have arrived, or were restored."""
    original(batch)
    session, waiting = current_session(), current_state(TransferredRequests)
    if session is None or waiting is None:
        return
    size = session.setup.spec.page_size
    slots, lengths = batch.req_pool_indices_cpu.tolist(), batch.seq_lens_cpu.tolist()
    # The tokens before ``start`` were here.
    for slot, start, length in zip(slots, batch.prefix_lens, lengths, strict=True):
        host_slots: torch.Tensor = session.req_to_token_pool.req_to_token[slot]
        pages = host_slots[start : length // size * size : size] // size
        session.coordinator.on_request_begin(slot)
        waiting.add(slot, pages.cpu().long())


def _around_free(original: Callable[..., None], pool: Any, request: Any) -> None:
    """End a request of a decode server, whose pool frees one slot at a time."""
    session = current_session()
    slot = request.kv.req_pool_idx
    original(pool, request)
    if session is not None and pool is session.req_to_token_pool:
        session.end_requests([slot])


def _around_setup_state_kv_args(
    original: Callable[..., None], kv_args: Any, token_to_kv_pool: Any, *args: Any, **kwargs: Any
) -> None:
    """Describe the scales of eight bits and an indexer's keys, which move beside K and V.

    They have formats of hisparse's own. The name of the dtype says so: SGLang
    refuses a pair of servers with different names.
    """
    from sglang.srt.disaggregation.base.conn import StateType
    from sglang.srt.disaggregation.utils import append_state_component

    original(kv_args, token_to_kv_pool, *args, **kwargs)
    session = current_session()
    if session is None:
        return
    host, tokens = token_to_kv_pool.host, token_to_kv_pool.page_size
    size, entries = host.kv.page_size, session.coordinator.stored_entries()
    kinds = [f"{name} {entries[name].dtype}" for name in sorted(entries)]
    if host.format is not host.format.plain:
        kinds.append(f"{host.kv.kv_cache_dtype} in pages of {size} tokens")
    moved = scale_buffers(host, tokens)
    if StateType.DSA not in kv_args.state_types:  # It has the keys.
        keys = entry_buffers(entries, tokens // size)
        moved = Buffers(*(a + b for a, b in zip(moved, keys, strict=True)))
    if moved.pointers:
        # SGLang would else take them for keys and then values.
        numbers = list(range(len(moved.pointers)))
        append_state_component(kv_args, StateType.BLOCK_SCALE, *moved, layer_ids=numbers)
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


class Disaggregation(Feature):
    """A server that only prefills, or only decodes."""

    name = "disaggregation"
    serves = (PREFILL_OR_DECODE,)
    excludes = {
        PREFILL_OR_DECODE: (
            ATTENTION_REPLICAS, REPLICAS, RANKS, PIPELINE, SPECULATION, OTHER_LAYOUT, STORAGE,
        ),
        DECODE: (PROMPT_QUERIES,),
    }  # fmt: skip
    flags = (
        Flag("disaggregation_mode", ("null", "prefill", "decode"), "--disaggregation-mode"),
        Flag(
            "disaggregation_transfer_backend",
            ("mooncake", "mooncake_tcp", "fake"),
            "--disaggregation-transfer-backend",
        ),
        Flag(
            "disaggregation_decode_host_receive_threshold",
            (1,),
            "--disaggregation-decode-host-receive-threshold",
        ),
        Flag(
            "disaggregation_decode_retraction_backup",
            ("cpu_tensor", "none"),
            "--disaggregation-decode-retraction-backup",
        ),
        Flag(
            "disaggregation_decode_enable_offload_kvcache",
            (False,),
            "--disaggregation-decode-enable-offload-kvcache",
        ),
        Flag("disaggregation_enable_kv_checksum", (False,), "--disaggregation-enable-kv-checksum"),
        Flag("enable_pd_role_switch", (False,), "--enable-pd-role-switch"),
    )
    hooks = {
        "sglang.srt.disaggregation.decode.DecodeReqToTokenPool.free": _around_free,
        "sglang.srt.disaggregation.decode.DecodeReqToTokenPool.write": around_write,
        "sglang.srt.disaggregation.decode_schedule_batch_mixin"
        ".ScheduleBatchDisaggregationDecodeMixin.prepare_for_prebuilt": (
            _around_prepare_for_prebuilt
        ),
        "sglang.srt.disaggregation.utils.setup_state_kv_args": _around_setup_state_kv_args,
        "sglang.srt.disaggregation.common.conn.CommonKVManager.try_ensure_parallel_info": (
            around_try_ensure_parallel_info
        ),
    }

    def prepare(self, start: Start) -> Mapping[str, Any]:
        """Set the flags that the command line does not give, and the settings of such a server.

        A prefill server never decodes, so no algorithm selects there and no representations are
        kept. An indexer's keys are kept: they move, and prompts are attended as the indexer
        selects.
        """
        args, changes = start.args, dict[str, Any](host_layout="layer_first")
        if args.disaggregation_mode == "decode":
            if args.disaggregation_decode_retraction_backup is None:
                # SGLang would else allocate a second pool in host memory, as large as its device
                # pool.
                args.disaggregation_decode_retraction_backup = "cpu_tensor"
            return changes
        if start.device == "cpu":
            # SGLang would else make a CUDA event, in the overlapped loop for a cached prefix, and
            # for indices in page-locked memory unless all context-parallel ranks send; here that is
            # one.
            args.disable_overlap_schedule = True
            os.environ.setdefault("SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER", "1")
        changes["extensions"] = {}
        if not ALGORITHMS.get(start.config.algorithm).indexer:
            changes |= _SELECTS_NOTHING
        return changes

    def demand(self, configurator: Any, shape: ModelShape) -> Demand:
        """Slots of requests that are on their way."""
        return Demand(request_slots=_extra_slots())

    def sized(self, session: ServerSession, server_args: Any) -> None:
        """Require slots for running requests.

        Raises:
            CapacityError: the device holds none of them.
        """
        extra, most = _extra_slots(), session.setup.sizing.max_requests
        if most - extra < 1:
            raise CapacityError(
                f"--disaggregation-decode-extra-slots is {extra}, and the device holds {most} "
                "requests; expected fewer extra slots"
            )

    def begin(self, session: ServerSession, configurator: Any) -> None:
        """Requests of a decode server begin when they arrive."""
        session.begins_on_alloc = not _decodes_only()

    def pool_mixin(self, kind: str) -> type | None:
        """Transfers, and copies of retracted requests."""
        return IndexerTransfers if kind == "dsa" else Transfers

    def built(self, session: ServerSession, model_runner: Any) -> None:
        """Make the requests that arrive ready to decode."""
        if _decodes_only():
            session.add(session.coordinator.receive_requests())


FEATURE = Disaggregation()
