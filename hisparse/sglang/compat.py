"""What differs between releases of SGLang: the only place that asks which one is installed."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

__all__ = [
    "NEWEST",
    "OLDEST",
    "allocate_on",
    "backend_choices",
    "index_pool_size",
    "installed",
    "is_resolved",
    "lacks_flag",
    "model_config_of",
    "pre_replay",
    "release_of",
    "schedule_and_serving",
    "since",
    "watch_rows",
]

#: The contract test passes on these and on releases between them.
OLDEST: Final = "0.5.16"
NEWEST: Final = "0.5.23"

#: Flags that older releases do not have, and so cannot be asked for.
_NEW_FLAGS: Final = ("enable_kv_cache_sharding",)


def installed() -> str | None:
    """Version of the installed SGLang; None without one."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def release_of(text: str) -> tuple[int, ...]:
    """``"0.5.20.post1"`` -> ``(0, 5, 20)``."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def since(release: str) -> bool:
    """Whether the installed SGLang is ``release`` or newer; true where there is none."""
    found = installed()
    return found is None or release_of(found) >= release_of(release)


def backend_choices() -> tuple[list[str], Callable[[list[str]], None]]:
    """Names of attention backends that the command line takes, and what adds to them."""
    if since("0.5.20"):
        from sglang.srt.arg_groups import choices
    else:
        from sglang.srt import server_args as choices
    return choices.ATTENTION_BACKEND_CHOICES, choices.add_attention_backend_choices


def is_resolved(server_args: Any) -> bool:
    """Whether SGLang has already filled in what the command line left open."""
    done = "_resolution_finished" if since("0.5.19") else "_declarations_materialized"
    return getattr(server_args, done, False)


def lacks_flag(view: Any, field: str) -> bool:
    """Whether this release is older than a flag of SGLang's."""
    return field in _NEW_FLAGS and not hasattr(view, field)


def model_config_of(server_args: Any) -> Any:
    """SGLang's ``ModelConfig``."""
    if not since("0.5.19"):
        return server_args.get_model_config()
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(server_args)


def index_pool_size(hf_config: Any) -> int:
    """Tokens that share a key of the model's indexer."""
    if not since("0.5.20"):
        return 1
    from sglang.srt.configs.model_config import get_dsa_index_kpool

    size: int = get_dsa_index_kpool(hf_config)
    return size


def schedule_and_serving() -> tuple[Any, Any]:
    """What holds ``max_running_requests``, and what holds ``served_model_name``."""
    from sglang.srt import runtime_context

    if since("0.5.18"):
        return runtime_context.get_schedule(), runtime_context.get_serving()
    return runtime_context.get_server_args(), runtime_context.get_server_args()


def pre_replay() -> Any:
    """SGLang's word for "no layer reads what the scheduler writes"; older ones do not ask."""
    if not since("0.5.18"):
        return None
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

    return SharedReadEnds.PRE_REPLAY


def allocate_on(device: str) -> None:
    """Let SGLang's allocator of pages work on ``device``: "cuda" or "cpu"."""
    if device == "cpu" and not since("0.5.22"):
        from sglang.srt.mem_cache import allocation
        from sglang.srt.mem_cache.allocator import paged
        from sglang.srt.model_executor import forward_batch_info

        from hisparse.sglang.cpu_pages import replace_triton

        # For these it is the backend's name that tells whether there is Triton.
        allocation.support_triton = forward_batch_info.support_triton = lambda backend: False
        allocation.get_last_loc_triton = allocation.get_last_loc_torch
        replace_triton(paged)


def watch_rows(pool: Any, begin: Callable[[list[int]], None]) -> None:
    """Call ``begin`` with the rows of SGLang's ``ReqToTokenPool`` that change hands."""
    if since("0.5.20"):
        pool.register_on_alloc_rows(begin)
    elif since("0.5.19"):
        pool.alloc_rows = _watched_rows(pool.alloc_rows, begin)
    else:
        pool.alloc = _watched_requests(pool.alloc, begin)


def _watched_rows(
    alloc_rows: Callable[[int], list[int] | None], begin: Callable[[list[int]], None]
) -> Callable[[int], list[int] | None]:
    def watched(need_size: int) -> list[int] | None:
        rows = alloc_rows(need_size)
        if rows:
            begin(rows)
        return rows

    return watched


def _watched_requests(
    alloc: Callable[[list[Any]], list[int] | None], begin: Callable[[list[int]], None]
) -> Callable[[list[Any]], list[int] | None]:
    def watched(requests: list[Any]) -> list[int] | None:
        new = [request for request in requests if request.req_pool_idx is None]
        rows = alloc(requests)
        if rows is not None and new:
            begin([request.req_pool_idx for request in new])
        return rows

    return watched
