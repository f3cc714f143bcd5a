"""Every SGLang name that the plugin hooks or uses. A test checks that each one exists."""

from __future__ import annotations

from collections.abc import Iterable

from hisparse.sglang.compat import since

__all__ = ["HOOKS", "LISTED", "USED"]


#: A name, or ``(release, name since that release, name before it)``; "" for no name.
_Name = str | tuple[str, str, str]


def _all_names(name: _Name) -> tuple[str, ...]:
    return (name,) if isinstance(name, str) else name[1:]


def _installed_names(names: Iterable[_Name]) -> tuple[str, ...]:
    """The names that apply to the installed release."""
    chosen = (name if isinstance(name, str) else name[2 - since(name[0])] for name in names)
    return tuple(name for name in chosen if name)


_HOOKS: tuple[_Name, ...] = (
    "sglang.srt.server_args.prepare_server_args",
    (
        "0.5.19",
        "sglang.srt.server_args.ServerArgs.resolve_once",
        "sglang.srt.server_args.ServerArgs.__post_init__",
    ),
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator.resolve_max_num_reqs",
    (
        "0.5.22",
        "sglang.srt.platforms.interface.SRTPlatform.get_kv_pool_cls",
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool",
    ),
    (
        "0.5.19",
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free_rows",
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.free",
    ),
    "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.write",
    "sglang.srt.managers.scheduler.Scheduler.flush_cache",
    (
        "0.5.23",
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        "._select_runners",
        "",
    ),
    "sglang.srt.models.utils.enable_fused_set_kv_buffer",
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
    ("0.5.23", "sglang.srt.speculative.eagle_worker_common.run_eagle_verify", ""),
    ("0.5.23", "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_lm_head", ""),
    (
        "0.5.23",
        "sglang.srt.speculative.draft_utils.DraftBackendFactory.create_decode_backend",
        "",
    ),
    (
        "0.5.23",
        "sglang.srt.speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend",
        "",
    ),
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.capture",
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph",
    "sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len",
    ("0.5.23", "sglang.srt.managers.schedule_batch.Req.__init__", ""),
    ("0.5.23", "sglang.srt.managers.schedule_batch.release_req", ""),
    ("0.5.23", "sglang.srt.disaggregation.decode.DecodeReqToTokenPool.free", ""),
    ("0.5.23", "sglang.srt.disaggregation.decode.DecodeReqToTokenPool.write", ""),
    (
        "0.5.23",
        "sglang.srt.disaggregation.decode_schedule_batch_mixin"
        ".ScheduleBatchDisaggregationDecodeMixin.prepare_for_prebuilt",
        "",
    ),
    ("0.5.23", "sglang.srt.disaggregation.utils.setup_state_kv_args", ""),
    (
        "0.5.23",
        "sglang.srt.disaggregation.common.conn.CommonKVManager.try_ensure_parallel_info",
        "",
    ),
    ("0.5.23", "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper", ""),
    "sglang.srt.arg_groups.overrides._dsa_kv_cache_dtype_default",
    (
        "0.5.19",
        "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments",
        "sglang.srt.server_args.ServerArgs._handle_model_specific_adjustments",
    ),
    (
        "0.5.18",
        "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator"
        "._compute_dsa_indexer_cell_size",
        "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
    ),
)

_USED: tuple[_Name, ...] = (
    (
        "0.5.20",
        "sglang.srt.arg_groups.choices.add_attention_backend_choices",
        "sglang.srt.server_args.add_attention_backend_choices",
    ),
    (
        "0.5.20",
        "sglang.srt.arg_groups.choices.ATTENTION_BACKEND_CHOICES",
        "sglang.srt.server_args.ATTENTION_BACKEND_CHOICES",
    ),
    "sglang.srt.arg_groups.overrides.attention_backends_of",
    (
        "0.5.19",
        "sglang.srt.arg_groups.overrides.model_config_of",
        "sglang.srt.server_args.ServerArgs.get_model_config",
    ),
    "sglang.srt.arg_groups.overrides.resolved_view",
    "sglang.srt.configs.hybrid_arch.mambaish_config",
    "sglang.srt.configs.model_config.AttentionArch",
    ("0.5.20", "sglang.srt.configs.model_config.get_dsa_index_kpool", ""),
    "sglang.srt.configs.model_config.get_dsa_index_topk",
    "sglang.srt.configs.model_config.is_deepseek_dsa",
    ("0.5.23", "sglang.srt.disaggregation.base.conn.StateType.BLOCK_SCALE", ""),
    ("0.5.23", "sglang.srt.disaggregation.utils.append_state_component", ""),
    "sglang.srt.distributed.parallel_state.get_attn_tp_group",
    "sglang.srt.distributed.parallel_state.get_world_group",
    "sglang.srt.environ.envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
    "sglang.srt.layers.attention.attention_registry.register_attention_backend",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_cuda_graph_state",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata_in_graph",
    "sglang.srt.layers.attention.base_attn_backend.AttentionBackend"
    ".init_forward_metadata_out_graph",
    ("0.5.18", "sglang.srt.layers.attention.base_attn_backend.SharedReadEnds.PRE_REPLAY", ""),
    "sglang.srt.layers.radix_attention.AttentionType.DECODER",
    "sglang.srt.layers.radix_attention.RadixAttention",
    "sglang.srt.mem_cache.allocation.get_last_loc_torch",
    "sglang.srt.mem_cache.allocation.get_last_loc_triton",
    ("0.5.22", "", "sglang.srt.mem_cache.allocation.support_triton"),
    ("0.5.22", "", "sglang.srt.mem_cache.allocator.paged.alloc_decode_kernel"),
    ("0.5.22", "", "sglang.srt.mem_cache.allocator.paged.alloc_extend_kernel"),
    ("0.5.22", "", "sglang.srt.model_executor.forward_batch_info.support_triton"),
    "sglang.srt.managers.schedule_batch.FINISH_ABORT",
    ("0.5.23", "sglang.srt.mem_cache.hicache_storage.HiCacheStorage", ""),
    ("0.5.23", "sglang.srt.mem_cache.hicache_storage.HiCacheStorageConfig", ""),
    ("0.5.23", "sglang.srt.mem_cache.hicache_storage.PoolName.KV", ""),
    "sglang.srt.mem_cache.memory_pool.DSATokenToKVPool",
    ("0.5.23", "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool", ""),
    "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers",
    "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool._create_buffers",
    ("0.5.20", "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.register_on_alloc_rows", ""),
    (
        "0.5.19",
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.alloc_rows",
        "sglang.srt.mem_cache.memory_pool.ReqToTokenPool.alloc",
    ),
    "sglang.srt.mem_cache.memory_pool.unwrap_write_loc",
    ("0.5.23", "sglang.srt.mem_cache.radix_cache.RadixKey", ""),
    (
        "0.5.23",
        "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory.create_backend",
        "",
    ),
    ("0.5.23", "sglang.srt.mem_cache.unified_cache.linker_factory.create_unified_cache_linker", ""),
    (
        "0.5.23",
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker.LayerWiseLoadCounter",
        "",
    ),
    (
        "0.5.23",
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinker"
        ".record_offload_ready",
        "",
    ),
    ("0.5.23", "sglang.srt.mem_cache.utils.get_storage_hash_str", ""),
    "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.register",
    "sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods"
    ".AttnForwardMethod.MLA",
    "sglang.srt.plugins.hook_registry.HookRegistry.register",
    "sglang.srt.plugins.hook_registry.HookType.AROUND",
    "sglang.srt.plugins.load_plugins",
    ("0.5.23", "sglang.srt.runtime_context.get_disagg", ""),
    "sglang.srt.runtime_context.get_parallel",
    (
        "0.5.18",
        "sglang.srt.runtime_context.get_schedule",
        "sglang.srt.runtime_context.get_server_args",
    ),
    ("0.5.18", "sglang.srt.runtime_context.get_serving", ""),
    "sglang.srt.utils.common.get_device",
)

#: Functions that the plugin wraps, in the installed release.
HOOKS = _installed_names(_HOOKS)

#: Names that the plugin calls, subclasses or reads, in the installed release.
USED = _installed_names(_USED)

#: The names in ``_HOOKS`` and ``_USED`` of all releases.
LISTED = {part for name in (*_HOOKS, *_USED) for part in _all_names(name)} - {""}
