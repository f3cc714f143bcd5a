"""The supported release of SGLang, and every name that the plugin hooks or uses of it.

A test checks that each name exists.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from typing import Final

__all__ = ["HOOKS", "RELEASE", "USED", "installed_release", "is_supported"]

#: The release of SGLang that hisparse supports.
RELEASE: Final = "0.5.23"

#: Functions that the plugin wraps.
HOOKS: Final = (
    "sglang.srt.server_args.prepare_server_args",
    "sglang.srt.server_args.ServerArgs.resolve_once",
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs",
    "sglang.srt.platforms.interface.SRTPlatform.get_kv_pool_cls",
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free_rows",
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.write",
    "sglang.srt.managers.scheduler.Scheduler.flush_cache",
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    "._select_runners",
    "sglang.srt.models.utils.enable_fused_set_kv_buffer",
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
    "sglang.srt.speculative.eagle_worker_common.run_eagle_verify",
    "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_lm_head",
    "sglang.srt.speculative.draft_utils.DraftBackendFactory.create_decode_backend",
    "sglang.srt.speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend",
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.capture",
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph",
    "sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len",
    "sglang.srt.managers.schedule_batch.Req.__init__",
    "sglang.srt.managers.schedule_batch.release_req",
    "sglang.srt.disaggregation.decode.DecodeReqToTokenPool.free",
    "sglang.srt.disaggregation.decode.DecodeReqToTokenPool.write",
    "sglang.srt.disaggregation.decode_schedule_batch_mixin.ScheduleBatchDisaggregationDecodeMixin"
    ".prepare_for_prebuilt",
    "sglang.srt.disaggregation.utils.setup_state_kv_args",
    "sglang.srt.disaggregation.common.conn.CommonKVManager.try_ensure_parallel_info",
    "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
    "sglang.srt.arg_groups.overrides._dsa_kv_cache_dtype_default",
    "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments",
    "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"
    "._compute_dsa_indexer_cell_size",
)

#: Names that the plugin calls, subclasses or reads.
USED: Final = (
    "sglang.srt.arg_groups.choices.add_attention_backend_choices",
    "sglang.srt.arg_groups.choices.ATTENTION_BACKEND_CHOICES",
    "sglang.srt.arg_groups.model_hook.resolved_view",
    "sglang.srt.arg_groups.overrides.attention_backends_of",
    "sglang.srt.arg_groups.overrides.model_config_of",
    "sglang.srt.arg_groups.overrides.resolved_view",
    "sglang.srt.configs.hybrid_arch.mambaish_config",
    "sglang.srt.configs.model_config.AttentionArch",
    "sglang.srt.configs.model_config.get_dsa_index_kpool",
    "sglang.srt.configs.model_config.get_dsa_index_topk",
    "sglang.srt.configs.model_config.is_deepseek_dsa",
    "sglang.srt.disaggregation.base.conn.StateType.BLOCK_SCALE",
    "sglang.srt.disaggregation.utils.append_state_component",
    "sglang.srt.distributed.parallel_state.get_attn_tp_group",
    "sglang.srt.distributed.parallel_state.get_world_group",
    "sglang.srt.environ.envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
    "sglang.srt.layers.attention.attention_registry.register_attention_backend",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_cuda_graph_state",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata_in_graph",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend"
    ".init_forward_metadata_out_graph",
    "sglang.srt.layers.attention.base_attn_backend.SharedReadEnds.PRE_REPLAY",
    "sglang.srt.layers.radix_attention.AttentionType.DECODER",
    "sglang.srt.layers.radix_attention.RadixAttention",
    "sglang.srt.mem_cache.allocation.get_last_loc_torch",
    "sglang.srt.mem_cache.allocation.get_last_loc_triton",
    "sglang.srt.managers.schedule_batch.FINISH_ABORT",
    "sglang.srt.mem_cache.hicache_storage.HiCacheStorage",
    "sglang.srt.mem_cache.hicache_storage.HiCacheStorageConfig",
    "sglang.srt.mem_cache.hicache_storage.PoolName.KV",
    "sglang.srt.mem_cache.memory_pool.DSATokenToKVPool",
    "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool",
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers",
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool._create_buffers",
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.register_on_alloc_rows",
    "sglang.srt.mem_cache.memory_pool.unwrap_write_loc",
    "sglang.srt.mem_cache.radix_cache.RadixKey",
    "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory.create_backend",
    "sglang.srt.mem_cache.unified_cache.linker_factory.create_unified_cache_linker",
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker.LayerWiseLoadCounter",
    "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinker"
    ".record_offload_ready",
    "sglang.srt.mem_cache.utils.get_storage_hash_str",
    "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.register",
    "sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods.AttnForwardMethod"
    ".MLA",
    "sglang.srt.plugins.hook_registry.HookRegistry.register",
    "sglang.srt.plugins.hook_registry.HookType.AROUND",
    "sglang.srt.plugins.load_plugins",
    "sglang.srt.runtime_context.get_disagg",
    "sglang.srt.runtime_context.get_parallel",
    "sglang.srt.runtime_context.get_schedule",
    "sglang.srt.runtime_context.get_serving",
    "sglang.srt.utils.common.get_device",
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
