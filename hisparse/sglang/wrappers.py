"""Wrappers of SGLang's functions in a server that uses hisparse, by the function's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hisparse.sglang import hooks, model_kinds
from hisparse.sglang.features import disaggregation, dsa, hybrids
from hisparse.sglang.features.speculation import draft_model

__all__ = ["WRAPPERS"]

WRAPPERS: dict[str, Callable[..., Any]] = {
    "_profile_available_bytes": hooks.around_profile_available_bytes,
    "resolve_max_num_reqs": hooks.around_resolve_max_num_reqs,
    "get_kv_pool_cls": hooks.around_get_kv_pool_cls,
    "free_rows": hooks.around_free_rows,
    "free": hooks.around_free,
    "__init__": hooks.around_request,
    "release_req": hooks.around_release_req,
    "write": hooks.around_write,
    "flush_cache": hooks.around_flush_cache,
    "_select_runners": hooks.around_select_runners,
    "enable_fused_set_kv_buffer": hooks.around_enable_fused_set_kv_buffer,
    "init_new": hooks.around_init_new,
    "run_eagle_verify": hooks.around_run_eagle_verify,
    "init_lm_head": draft_model.around_init_lm_head,
    "create_decode_backend": draft_model.around_create_decode_backend,
    "create_draft_extend_backend": draft_model.around_create_draft_extend_backend,
    "capture": hooks.around_capture,
    "can_run_graph": hooks.around_can_run_graph,
    "_compute_max_prefix_len": hooks.around_compute_max_prefix_len,
    "handle_model_specific_adjustments": model_kinds.around_model_specific_adjustments,
    "attn_backend_wrapper": hybrids.around_attn_backend_wrapper,
    "prepare_for_prebuilt": disaggregation.around_prepare_for_prebuilt,
    "setup_state_kv_args": disaggregation.around_setup_state_kv_args,
    "try_ensure_parallel_info": disaggregation.around_try_ensure_parallel_info,
    "_dsa_kv_cache_dtype_default": dsa.around_kv_cache_dtype_default,
    "_compute_dsa_indexer_cell_size": dsa.around_compute_indexer_cell_size,
}
