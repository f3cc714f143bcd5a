"""Differences between releases of SGLang. No other module asks for the installed release."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

__all__ = [
    "DISAGGREGATION",
    "HYBRIDS",
    "LINKER",
    "RELEASE",
    "REPLICAS",
    "SPECULATION",
    "attention_replicas",
    "backend_choices",
    "decode_extra_slots",
    "decodes_only",
    "enable_page_allocator",
    "has_disaggregation",
    "has_linker",
    "index_pool_size",
    "installed",
    "is_resolved",
    "is_supported",
    "lacks_flag",
    "logical_mode",
    "model_config_of",
    "num_replicas",
    "on_slots_allocated",
    "pipeline_size",
    "rank_labels",
    "release_of",
    "schedule_and_serving",
    "shared_read_ends",
    "since",
    "slot_of",
]

#: The release of SGLang that hisparse supports.
RELEASE: Final = "0.5.23"

#: The first release with an external linker that a package can provide and that loads by request.
LINKER: Final = "0.5.23"

#: The first release that tells a process its place among replicas, as the plug-in reads it.
REPLICAS: Final = "0.5.23"

#: The first release whose prefill and decode servers are supported.
DISAGGREGATION: Final = "0.5.23"

#: The first release that the tests run speculative decoding with.
SPECULATION: Final = "0.5.23"

#: The first release whose hybrids are supported.
HYBRIDS: Final = "0.5.23"

#: Flags that older releases lack.
_NEW_FLAGS: Final = (
    "attn_dp_size",
    "enable_kv_cache_sharding",
    "disaggregation_decode_host_receive_threshold",
    "disaggregation_decode_retraction_backup",
    "disaggregation_decode_enable_offload_kvcache",
    "disaggregation_enable_kv_checksum",
    "enable_pd_role_switch",
)


def installed() -> str | None:
    """Version of the installed SGLang, or None if SGLang is not installed."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def is_supported(found: str) -> bool:
    """Whether a version is that of :data:`RELEASE`, or of one of its post-releases."""
    return release_of(found) == release_of(RELEASE)


def release_of(text: str) -> tuple[int, ...]:
    """``"0.5.20.post1"`` -> ``(0, 5, 20)``."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def since(release: str) -> bool:
    """Whether the installed SGLang is ``release`` or newer; True if SGLang is not installed."""
    found = installed()
    return found is None or release_of(found) >= release_of(release)


def has_linker() -> bool:
    """Whether the installed release can keep prefixes in a store below host memory."""
    return since(LINKER)


def has_disaggregation() -> bool:
    """Whether prefill and decode servers are supported on the installed release."""
    return since(DISAGGREGATION)


def decodes_only() -> bool:
    """Whether this server gets its requests prefilled from another one."""
    if not has_disaggregation():
        return False
    from sglang.srt.runtime_context import get_disagg

    mode: str = get_disagg().disaggregation_mode
    return mode == "decode"


def decode_extra_slots() -> int:
    """Request slots of a decode server for requests that are on their way."""
    if not decodes_only():
        return 0
    from sglang.srt.runtime_context import get_disagg

    return get_disagg().disaggregation_decode_extra_slots or 0


def slot_of(request: Any) -> int:
    """The request slot of SGLang's ``Req``."""
    slot: int = request.kv.req_pool_idx if has_disaggregation() else request.req_pool_idx
    return slot


def backend_choices() -> tuple[list[str], Callable[[list[str]], None]]:
    """Choices of ``--attention-backend``, and the function that adds to them."""
    if since("0.5.20"):
        from sglang.srt.arg_groups import choices
    else:
        from sglang.srt import server_args as choices
    return choices.ATTENTION_BACKEND_CHOICES, choices.add_attention_backend_choices


def is_resolved(server_args: Any) -> bool:
    """Whether SGLang has already resolved the defaults of its arguments."""
    field = "_resolution_finished" if since("0.5.19") else "_declarations_materialized"
    return getattr(server_args, field, False)


def lacks_flag(view: Any, field: str) -> bool:
    """Whether the installed release is too old to have the argument ``field``."""
    return field in _NEW_FLAGS and not hasattr(view, field)


def logical_mode(forward_batch: Any) -> Any:
    """The ``ForwardMode`` of a forward batch's requests.

    SGLang relabels decode steps EXTEND where all ranks have to run one shape.
    """
    if not since(REPLICAS):
        return forward_batch.forward_mode
    return forward_batch.logical_forward_mode


def model_config_of(server_args: Any) -> Any:
    """SGLang's ``ModelConfig`` for ``server_args``."""
    if not since("0.5.19"):
        return server_args.get_model_config()
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(server_args)


def index_pool_size(hf_config: Any) -> int:
    """Number of tokens that share one key of the model's indexer."""
    if not since("0.5.20"):
        return 1
    from sglang.srt.configs.model_config import get_dsa_index_kpool

    size: int = get_dsa_index_kpool(hf_config)
    return size


def schedule_and_serving() -> tuple[Any, Any]:
    """The objects that hold ``max_running_requests`` and ``served_model_name``."""
    from sglang.srt import runtime_context

    if since("0.5.18"):
        return runtime_context.get_schedule(), runtime_context.get_serving()
    return runtime_context.get_server_args(), runtime_context.get_server_args()


def attention_replicas() -> int:
    """Parts into which the ranks of a model divide its requests (``--attn-dp-size``)."""
    if not since(REPLICAS):
        return 1
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_dp_size)


def pipeline_size() -> int:
    """Ranks that each have some of a model's layers (``--pp-size``)."""
    if not since(REPLICAS):
        return 1
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().pp_size)


def num_replicas() -> int:
    """Replicas of this process's server (``--dp-size``). Each has ranks of its own."""
    if not since(REPLICAS):
        return 1
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.num_dp_ranks // parallel.attn_dp_size)


def rank_labels() -> dict[str, int]:
    """Labels of this process's metrics, as SGLang labels its own."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    labels = {"tp_rank": parallel.tp_rank}
    if since(REPLICAS):
        labels |= {} if parallel.dp_rank is None else {"dp_rank": parallel.dp_rank}
        labels |= {} if parallel.pp_size == 1 else {"pp_rank": parallel.pp_rank}
    return labels


def shared_read_ends() -> Any:
    """``SharedReadEnds.PRE_REPLAY``: no layer reads the scheduler's tables. None before 0.5.18."""
    if not since("0.5.18"):
        return None
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

    return SharedReadEnds.PRE_REPLAY


def enable_page_allocator(device: str) -> None:
    """Make SGLang's page allocator work on ``device``, "cuda" or "cpu".

    Speculative decoding asks Triton for the last slot of each request.
    """
    if device != "cpu":
        return
    from sglang.srt.mem_cache import allocation

    allocation.get_last_loc_triton = allocation.get_last_loc_torch


def on_slots_allocated(pool: Any, begin: Callable[[list[int]], None]) -> None:
    """Call ``begin`` with the request slots that ``pool`` allocates, each time it allocates some.

    Args:
        pool: SGLang's ``ReqToTokenPool``.
        begin: takes the list of newly allocated request slots.
    """
    if since("0.5.20"):
        pool.register_on_alloc_rows(begin)
    elif since("0.5.19"):
        pool.alloc_rows = _wrap_alloc_rows(pool.alloc_rows, begin)
    else:
        pool.alloc = _wrap_alloc(pool.alloc, begin)


def _wrap_alloc_rows(
    alloc_rows: Callable[[int], list[int] | None], begin: Callable[[list[int]], None]
) -> Callable[[int], list[int] | None]:
    def wrapper(need_size: int) -> list[int] | None:
        slots = alloc_rows(need_size)
        if slots:
            begin(slots)
        return slots

    return wrapper


def _wrap_alloc(
    alloc: Callable[[list[Any]], list[int] | None], begin: Callable[[list[int]], None]
) -> Callable[[list[Any]], list[int] | None]:
    def wrapper(requests: list[Any]) -> list[int] | None:
        # A chunked request keeps its slot.
        new = [request for request in requests if request.req_pool_idx is None]
        slots = alloc(requests)
        if slots is not None and new:
            begin([request.req_pool_idx for request in new])
        return slots

    return wrapper
