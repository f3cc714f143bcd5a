"""The pool in host memory that holds the whole KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.cache.allocate import zeros
from hisparse.cache.codec import split_layers
from hisparse.cache.shared_memory import NodeRanks
from hisparse.types import HostLayout, KVSpec, PagedKV, StoredKV

__all__ = ["HOST_LAYOUTS", "HostKVPool"]

#: Order of the dimensions in memory, slowest first, of keys and of values each.
HOST_LAYOUTS: dict[HostLayout, str] = {
    "layer_first": "LPSHD",
    "page_first": "PLSHD",
    "page_head": "LPHSD",
}
_VIEW = "LPHSD"
_CPU = torch.device("cpu")


class HostKVPool:
    """Keys and values of every token in host memory; the place of a token is a "host slot".

    Args:
        kv: shapes of the model.
        num_pages: pages, including the padding page 0.
        layout: ``layer_first`` and ``page_first`` keep a token's heads together, ``page_head``
            keeps each head's page contiguous, which suits selections per head.
        pin: page-lock the memory, so that a GPU can read it.
        ranks: the processes of the node. Those of an MLA model share one pool, since they compute
            the same latents. Each writes all tokens: two ranks write the same bytes to the same
            place, and a rank reads what it has written itself, so no rank waits for another.
    """

    def __init__(
        self,
        kv: KVSpec,
        num_pages: int,
        layout: HostLayout,
        *,
        pin: bool,
        ranks: NodeRanks | None = None,
    ) -> None:
        self.kv = kv
        self._ranks = ranks if kv.latent else None
        self.num_pages = num_pages
        self.layout = layout
        order, dtype = HOST_LAYOUTS[layout], kv.stored_dtype
        self._k = self._allocate(order, kv.stored_key_width, dtype, pin=pin)
        self._v = (
            self._k[..., : kv.v_head_dim]
            if kv.latent
            else self._allocate(order, kv.v_head_dim, dtype, pin=pin)
        )
        # A page's scales are only a few bytes, and contiguous in every layout.
        paged = order.replace("SHD", "HSD")
        scales = self._allocate(paged, 2, torch.uint8, pin=pin) if kv.num_scales else None
        self._layers = split_layers(self._k, self._v, scales)

    def _allocate(self, order: str, width: int, dtype: torch.dtype, *, pin: bool) -> Tensor:
        """``[L, P, Hkv, S, width]``, a view of memory in the given order."""
        sizes = {
            "L": self.kv.num_layers,
            "P": self.num_pages,
            "S": self.kv.page_size,
            "H": self.kv.num_kv_heads,
            "D": width,
        }
        storage = zeros([sizes[x] for x in order], dtype, _CPU, pin=pin, ranks=self._ranks)
        return storage.permute([order.index(x) for x in _VIEW])

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values, scales included."""
        return self.num_pages * self.kv.page_size * self.kv.token_bytes

    @property
    def rank_bytes(self) -> int:
        """This rank's share of ``num_bytes``: all of them, or a part of a shared pool."""
        return self.num_bytes // (1 if self._ranks is None else self._ranks.size)

    def layer(self, layer_id: int) -> PagedKV:
        """Keys and values of one layer as stored, ``[P, Hkv, S, D]`` views."""
        return self.stored(layer_id).kv

    def stored(self, layer_id: int) -> StoredKV:
        """One layer with its scales, if it has any."""
        return self._layers[layer_id]

    def tokens(self, layer_id: int) -> PagedKV | None:
        """One layer as ``[slots, Hkv, D]`` views, None where the layout has no such view."""
        if self.layout != "layer_first":
            return None
        k, v = (x[layer_id].transpose(1, 2).flatten(0, 1) for x in (self._k, self._v))
        return PagedKV(k, v)
