"""The supported release of SGLang, and what the plug-in uses of it. A test finds each name.

Imports nothing that takes time: every process of every server does.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

#: The release of SGLang that hisparse supports.
RELEASE: Final = "0.5.23"

#: Names of the attention backend in SGLang, and of that of draft models.
BACKEND: Final = "hisparse"
DRAFT_BACKEND: Final = "hisparse_draft"

#: Members of classes that the plug-in calls, overrides or reads. What it imports, its files say.
MEMBERS: Final = (
    "sglang.srt.configs.model_config.AttentionArch.MLA",
    "sglang.srt.disaggregation.base.conn.StateType.BLOCK_SCALE",
    "sglang.srt.environ.envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_cuda_graph_state",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata_in_graph",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend"
    ".init_forward_metadata_out_graph",
    "sglang.srt.layers.attention.base_attn_backend.SharedReadEnds.PRE_REPLAY",
    "sglang.srt.layers.radix_attention.AttentionType.DECODER",
    "sglang.srt.mem_cache.allocation.get_last_loc_torch",
    "sglang.srt.mem_cache.allocation.get_last_loc_triton",
    "sglang.srt.mem_cache.hicache_storage.PoolName.KV",
    "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool",
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers",
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool._create_buffers",
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.register_on_alloc_rows",
    "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory.create_backend",
    "sglang.srt.mem_cache.unified_cache.linker_factory.create_unified_cache_linker",
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinker"
    ".record_offload_ready",
    "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.register",
    "sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods.AttnForwardMethod"
    ".MLA",
    "sglang.srt.plugins.hook_registry.HookRegistry.register",
    "sglang.srt.plugins.hook_registry.HookType.AROUND",
    "sglang.srt.arg_groups.model_hook.resolved_view",
)


def installed_release() -> str | None:
    """Version of the installed SGLang, or None if SGLang is not installed."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def is_supported(found: str) -> bool:
    """Whether a version is that of :data:`RELEASE`, or of a build of it, such as a post-release."""
    return re.match(rf"{re.escape(RELEASE)}(?!\d)", found) is not None


def is_requested(server_args: Any) -> bool:
    """Whether one of SGLang's three attention backend flags names hisparse."""
    flags = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return any(getattr(server_args, flag, None) == BACKEND for flag in flags)
