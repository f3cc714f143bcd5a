"""Every SGLang name that the plugin touches; a test checks that each one exists."""

from __future__ import annotations

__all__ = ["HOOKS", "USED"]

#: Functions that the plugin wraps.
HOOKS = (
    "sglang.srt.server_args.prepare_server_args",
    "sglang.srt.server_args.ServerArgs.resolve_once",
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs",
    "sglang.srt.platforms.interface.SRTPlatform.get_kv_pool_cls",
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free_rows",
    "sglang.srt.managers.scheduler.Scheduler.flush_cache",
    "sglang.srt.models.utils.enable_fused_set_kv_buffer",
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
    "sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len",
    "sglang.srt.arg_groups.overrides._dsa_kv_cache_dtype_default",
    "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"
    "._compute_dsa_indexer_cell_size",
)

#: Names that it calls, subclasses or reads.
USED = (
    "sglang.srt.arg_groups.choices.add_attention_backend_choices",
    "sglang.srt.arg_groups.choices.ATTENTION_BACKEND_CHOICES",
    "sglang.srt.arg_groups.model_override_base.attention_backends_of",
    "sglang.srt.arg_groups.overrides.model_config_of",
    "sglang.srt.arg_groups.overrides.resolved_view",
    "sglang.srt.configs.model_config.AttentionArch",
    "sglang.srt.configs.model_config.get_dsa_index_kpool",
    "sglang.srt.configs.model_config.get_dsa_index_topk",
    "sglang.srt.configs.model_config.is_deepseek_dsa",
    "sglang.srt.environ.envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
    "sglang.srt.layers.attention.attention_registry.register_attention_backend",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend",
    "sglang.srt.layers.attention.base_attn_backend.SharedReadEnds.PRE_REPLAY",
    "sglang.srt.layers.radix_attention.AttentionType.DECODER",
    "sglang.srt.layers.radix_attention.RadixAttention",
    "sglang.srt.mem_cache.memory_pool.DSATokenToKVPool",
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers",
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool._create_buffers",
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.register_on_alloc_rows",
    "sglang.srt.mem_cache.memory_pool.unwrap_write_loc",
    "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.register",
    "sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods"
    ".AttnForwardMethod.MLA",
    "sglang.srt.plugins.hook_registry.HookRegistry.register",
    "sglang.srt.plugins.hook_registry.HookType.AROUND",
    "sglang.srt.runtime_context.get_parallel",
    "sglang.srt.runtime_context.get_schedule",
    "sglang.srt.runtime_context.get_serving",
)
