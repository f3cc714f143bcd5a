"""SGLang's KV pool, in host memory: a KV location is a host slot."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, unwrap_write_loc

from hisparse.cache import HostKVPool
from hisparse.errors import HiSparseError
from hisparse.kernels import scatter_tokens
from hisparse.sglang import runtime

__all__ = ["HiSparseMHAPool"]


class HiSparseMHAPool(MHATokenToKVPool):  # type: ignore[misc]
    """Allocates nothing on the device; every method that takes locations is overridden."""

    def _create_buffers(self) -> None:
        session = runtime.session()
        spec = session.spec
        num_pages = (self.size + self.page_size) // spec.page_size
        pin = torch.device(self.device).type == "cuda"
        self.host = HostKVPool(spec, num_pages, session.layout, pin=pin)

    def _clear_buffers(self) -> None:
        del self.host

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of keys and of values, in host memory."""
        spec = self.host.kv
        keys = self.host.num_bytes * spec.head_dim // (spec.head_dim + spec.v_head_dim)
        return keys, self.host.num_bytes - keys

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: torch.Tensor, *_: Any
    ) -> None:
        """Write K/V through to host memory, ``[T, Hkv, D]`` each.

        The attention backend writes its own tokens: they have to reach the device pages too.
        """
        loc, _, _ = unwrap_write_loc(loc_info)
        pages = self.host.layer(layer.layer_id - self.start_layer)
        scatter_tokens(cache_k.to(self.dtype), cache_v.to(self.dtype), pages, loc)

    def _get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self._token_view(layer_id)[0]

    def _get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self._token_view(layer_id)[1]

    def _token_view(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
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
