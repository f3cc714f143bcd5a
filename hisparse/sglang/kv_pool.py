"""SGLang's KV pools in host memory. SGLang's KV locations are host slots."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, unwrap_write_loc

from hisparse.cache import HostKVPool
from hisparse.cache.kv_io import write_tokens
from hisparse.errors import HiSparseError
from hisparse.sglang.session import errors_logged, require_session

_USE_BACKEND = "only models that attend through SGLang's attention backend are served"


def rejected(method: str, caller: str, remedy: str = "turn it off") -> Callable[..., NoReturn]:
    """A method of SGLang's pools that has no meaning here, and raises ``HiSparseError``."""

    def reject(*args: Any, **kwargs: Any) -> NoReturn:
        raise HiSparseError(
            f"KV pool: got {method}() from {caller}, expected no such call while the KV cache lies "
            f"in host memory; {remedy}"
        )

    reject.__name__ = method
    return reject


class _HostPool:
    """Base of the pools. Allocates no device memory.

    Overrides every method of SGLang's pools that takes locations; those without a meaning here
    raise ``HiSparseError``.
    """

    device: str
    dtype: torch.dtype
    size: int
    page_size: int
    start_layer: int
    host: HostKVPool

    def _create_buffers(self) -> None:
        session = require_session()
        spec = session.setup.spec
        num_pages = (self.size + self.page_size) // spec.page_size
        pin = torch.device(self.device).type == "cuda"
        with errors_logged():
            layout = session.setup.resolved.layout
            self.host = HostKVPool(spec, num_pages, layout, pin=pin, ranks=session.ranks)
        session.pool = self

    def _init_kv_copy_and_warmup(self) -> None:
        """Prepare nothing: SGLang would prepare to copy between device buffers."""
        self._kv_copy_config = None

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        *_: Any,
        layer_id_override: int | None = None,
        **__: Any,
    ) -> None:
        """Write K/V to host memory.

        The attention backend does not use this method: its tokens go to the device pages as well.

        Args:
            layer: SGLang's ``RadixAttention``.
            loc_info: ``[T] int64`` host slots, or SGLang's object that holds them.
            cache_k, cache_v: ``[T, Hkv, Dk]`` and ``[T, Hkv, Dv]``, any float dtype.
            _, __: scales and a mask, ignored.
            layer_id_override: number of the pool's layer; None: that of ``layer``.
        """
        loc, _, _ = unwrap_write_loc(loc_info)
        kv = self.host.kv
        new = self.host.format.encode(cache_k.to(kv.dtype), cache_v.to(kv.dtype))
        number = layer_id_override
        if number is None:
            number = layer.layer_id - self.start_layer
        write_tokens(new, self.host.stored(number), loc)

    def _get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Keys of a layer, ``[slots, Hkv, Dk]``, in the model's dtype."""
        return self._token_view(layer_id)[0]

    def _get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Values of a layer, ``[slots, Hkv, Dv]``, in the model's dtype."""
        return self._token_view(layer_id)[1]

    def _token_view(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.host.format is not self.host.format.plain:
            raise HiSparseError(
                f"KV pool: got a read by location of K and V in {self.host.kv.kv_cache_dtype}, "
                "expected K and V in the model's dtype; use --kv-cache-dtype auto"
            )
        view = self.host.tokens(layer_id - self.start_layer)
        if view is None:
            raise HiSparseError(
                f"KV pool: got a read by location with host_layout {self.host.layout!r}, expected "
                "a layout with token views; set host_layout to 'layer_first'"
            )
        return view

    get_contiguous_buf_infos = rejected("get_contiguous_buf_infos", "a transfer between servers")
    get_cpu_copy = rejected("get_cpu_copy", "a retraction of a decode server")
    load_cpu_copy = rejected("load_cpu_copy", "a retraction of a decode server")
    move_kv_cache = rejected("move_kv_cache", "speculative decoding")
    set_kv_buffer_prefix_valid = rejected("set_kv_buffer_prefix_valid", "speculative decoding")
    get_raw_kv_buffer = rejected("get_raw_kv_buffer", "SGLang's quantized KV cache")
    get_device_pool_infos = rejected("get_device_pool_infos", "HiCache")


class HiSparseMHAPool(_HostPool, MHATokenToKVPool):  # type: ignore[misc]
    """Keys and values per KV head (MHA, GQA)."""

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Host memory of the keys and of the values, in bytes."""
        spec = self.host.kv
        keys = self.host.num_bytes * spec.head_dim // (spec.head_dim + spec.v_head_dim)
        return keys, self.host.num_bytes - keys


class LatentPool(_HostPool):
    """One latent per token: the key. The value is the latent's first ``v_head_dim`` columns."""

    def _create_buffers(self) -> None:
        super()._create_buffers()
        # SGLang iterates over this list of device buffers; hisparse has none.
        self.kv_buffer: list[torch.Tensor] = []

    def get_kv_size_bytes(self) -> int:
        """Host memory of all latents, in bytes."""
        return self.host.num_bytes

    def get_kv_buffer_shape(self) -> tuple[torch.Size, torch.Size]:
        """Shapes of the keys and of the values. DeepSeek's models read them before each prompt."""
        spec, slots = self.host.kv, self.size + self.page_size
        return torch.Size((slots, 1, spec.head_dim)), torch.Size((slots, 1, spec.v_head_dim))

    #: SGLang's own read its device buffers.
    get_key_buffer, get_value_buffer = _HostPool._get_key_buffer, _HostPool._get_value_buffer
    set_mla_kv_buffer = rejected("set_mla_kv_buffer", "the model", _USE_BACKEND)
    get_mla_kv_buffer = rejected("get_mla_kv_buffer", "the model", _USE_BACKEND)


class HiSparseMLAPool(LatentPool, MLATokenToKVPool):  # type: ignore[misc]
    """Latents of models such as DeepSeek-V2 and DeepSeek-V3."""


#: Pool classes by SGLang's name for the kind of pool.
POOLS: dict[str, type] = {
    "mha": HiSparseMHAPool,
    "mla": HiSparseMLAPool,
}
