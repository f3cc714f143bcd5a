"""KV pools of DeepSeek-V3.2: latents without SGLang's index keys."""

from collections.abc import Mapping
from typing import Any

from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MLATokenToKVPool

from hisparse.sglang.kv_pool import LatentPool, rejected


class HiSparseDSAPool(LatentPool, DSATokenToKVPool):  # type: ignore[misc]
    """Latents of DeepSeek-V3.2. The algorithm ``dsa`` keeps the index keys as representations."""

    def __init__(self, size: int, *, index_head_dim: int, **options: Any) -> None:
        _init_without_index(self, size, options)
        self.index_head_dim = index_head_dim

    _reject_index_access = rejected(
        "an index key method", "SGLang's index key cache", "the algorithm dsa keeps them"
    )
    get_index_k_with_scale_buffer = _reject_index_access
    get_index_k_scale_buffer = _reject_index_access
    set_index_k_scale_buffer = _reject_index_access
    get_compress_tail_buffers = _reject_index_access
    kpool_decode_update_index_cache = _reject_index_access
    set_compress_tail_for_request = _reject_index_access


class DraftDSAPool(DSATokenToKVPool):  # type: ignore[misc]
    """Latents of a draft model with an indexer, on the device; it attends all, without the keys."""

    def __init__(self, size: int, *, index_head_dim: int, **options: Any) -> None:
        _init_without_index(self, size, options)

    get_kv_size_bytes = MLATokenToKVPool.get_kv_size_bytes


def _init_without_index(pool: Any, size: int, options: Mapping[str, Any]) -> None:
    """Initialize a pool of latents: ``DSATokenToKVPool`` would allocate index keys as well."""
    shared = ["page_size", "dtype", "kv_lora_rank", "qk_rope_head_dim", "layer_num", "device"]
    shared += ["enable_memory_saver", "start_layer", "end_layer"]
    MLATokenToKVPool.__init__(pool, size, **{name: options[name] for name in shared})
