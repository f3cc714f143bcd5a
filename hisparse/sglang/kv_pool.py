"""SGLang's KV pool, in host memory: a KV location is a host slot."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    unwrap_write_loc,
)

from hisparse.cache import HostKVPool
from hisparse.cache.codec import encode, write_tokens
from hisparse.errors import HiSparseError
from hisparse.sglang.session import session as current_session

__all__ = ["POOLS", "HiSparseDSAPool", "HiSparseMHAPool", "HiSparseMLAPool"]


class _HostPool:
    """Allocates nothing on the device; every method that takes locations is overridden."""

    device: str
    dtype: torch.dtype
    size: int
    page_size: int
    start_layer: int
    host: HostKVPool

    def _create_buffers(self) -> None:
        session = current_session()
        spec = session.spec
        num_pages = (self.size + self.page_size) // spec.page_size
        pin = torch.device(self.device).type == "cuda"
        self.host = HostKVPool(spec, num_pages, session.layout, pin=pin)

    def _clear_buffers(self) -> None:
        del self.host

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: torch.Tensor, *_: Any
    ) -> None:
        """Write K/V through to host memory, ``[T, Hkv, D]`` each.

        The attention backend writes its own tokens: they have to reach the device pages too.
        """
        loc, _, _ = unwrap_write_loc(loc_info)
        kv = self.host.kv
        new = encode(kv, cache_k.to(kv.dtype), cache_v.to(kv.dtype))
        write_tokens(new, self.host.stored(layer.layer_id - self.start_layer), loc)

    def _get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self._token_view(layer_id)[0]

    def _get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self._token_view(layer_id)[1]

    def _token_view(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.host.kv.fp8:
            raise HiSparseError(
                "something other than hisparse reads the KV pool by location, whose K and V have "
                "scales of their own; use --kv-cache-dtype auto"
            )
        view = self.host.tokens(layer_id - self.start_layer)
        if view is None:
            raise HiSparseError(
                f"something other than hisparse reads the KV pool by location, which host_layout "
                f"{self.host.layout!r} does not offer; set host_layout to 'layer_first'"
            )
        return view

    def _refuse(self, what: str) -> NoReturn:
        raise HiSparseError(f"{what} is not supported while the KV cache lies in host memory")

    def get_contiguous_buf_infos(self) -> NoReturn:
        """Refused: prefill/decode disaggregation would register device buffers."""
        self._refuse("prefill/decode disaggregation")

    def get_cpu_copy(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the KV cache is in host memory already."""
        self._refuse("offloading the KV cache")

    def load_cpu_copy(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: see :meth:`get_cpu_copy`."""
        self._refuse("offloading the KV cache")

    def move_kv_cache(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: speculative decoding moves KV between locations."""
        self._refuse("moving KV between locations")

    def set_kv_buffer_prefix_valid(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: speculative decoding writes prefixes of drafts."""
        self._refuse("writing part of a draft")

    def get_raw_kv_buffer(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: quantised KV reads raw buffers."""
        self._refuse("quantised KV")

    def get_device_pool_infos(self) -> NoReturn:
        """Refused: HiCache would back up device buffers."""
        self._refuse("HiCache")


class HiSparseMHAPool(_HostPool, MHATokenToKVPool):  # type: ignore[misc]
    """Keys and values of models with attention heads of their own (MHA, GQA)."""

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of keys and of values, in host memory."""
        spec = self.host.kv
        keys = self.host.num_bytes * spec.head_dim // spec.stored_width
        return keys, self.host.num_bytes - keys


class _LatentPool(_HostPool):
    """One latent per token: its key, and in the first columns its value."""

    def _create_buffers(self) -> None:
        super()._create_buffers()
        # SGLang lists the device buffers: there are none.
        self.kv_buffer: list[torch.Tensor] = []

    def get_kv_size_bytes(self) -> int:
        """Bytes of all latents, in host memory."""
        return self.host.num_bytes

    def get_kv_buffer_shape(self) -> tuple[torch.Size, torch.Size]:
        """Of keys and of values; DeepSeek's models ask for it before each prompt."""
        spec, slots = self.host.kv, self.size + self.page_size
        return torch.Size((slots, 1, spec.head_dim)), torch.Size((slots, 1, spec.v_head_dim))

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """``[slots, 1, D]``, a view of host memory."""
        return self._get_key_buffer(layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """``[slots, 1, Dv]``, a view of host memory."""
        return self._get_value_buffer(layer_id)

    def set_mla_kv_buffer(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: new tokens pass through the backend."""
        self._refuse("writing latents past the attention backend")

    def get_mla_kv_buffer(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: attention over gathered latents is not what the backend does."""
        self._refuse("reading latents past the attention backend")


class HiSparseMLAPool(_LatentPool, MLATokenToKVPool):  # type: ignore[misc]
    """Latents of models such as DeepSeek-V2 and V3."""


class HiSparseDSAPool(_LatentPool, DSATokenToKVPool):  # type: ignore[misc]
    """Latents of DeepSeek-V3.2; its index keys are representations of the algorithm `dsa`."""

    def __init__(self, size: int, *, index_head_dim: int, **options: Any) -> None:
        shared = ["page_size", "dtype", "kv_lora_rank", "qk_rope_head_dim", "layer_num", "device"]
        shared += ["enable_memory_saver", "start_layer", "end_layer"]
        # Not DSATokenToKVPool's own: it allocates index keys on the device.
        MLATokenToKVPool.__init__(self, size, **{name: options[name] for name in shared})
        self.index_head_dim = index_head_dim

    def _refuse_index(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the algorithm keeps the index keys."""
        self._refuse("an index key cache of SGLang's own")

    get_index_k_with_scale_buffer = _refuse_index
    get_index_k_scale_buffer = _refuse_index
    set_index_k_scale_buffer = _refuse_index
    get_compress_tail_buffers = _refuse_index
    get_compress_tail_buf_infos = _refuse_index
    kpool_decode_update_index_cache = _refuse_index
    set_compress_tail_for_request = _refuse_index
    get_state_buf_infos = _refuse_index


#: By SGLang's name of the kind.
POOLS: dict[str, type] = {
    "mha": HiSparseMHAPool,
    "mla": HiSparseMLAPool,
    "dsa": HiSparseDSAPool,
}
