"""The pool in host memory that holds the whole KV cache."""

import contextlib

import torch
from torch import Tensor

from hisparse.cache.allocate import NodeRanks, zeros
from hisparse.cache.formats import StoredPart, format_of
from hisparse.cache.numa import near_gpu
from hisparse.types import HostLayout, KVSpec, PagedKV, StoredKV

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
        num_pages: pages, including the padding page 0.
        layout: ``layer_first`` and ``page_first`` keep a token's heads together, ``page_head``
            keeps each head's page contiguous, which suits selections per head.
        pin: page-lock the memory, so that the current GPU can read it, on its NUMA node if it fits.
        ranks: the processes of the node. Those of an MLA model share one pool, since they compute
            the same latents. Each writes all tokens: two ranks write the same bytes to the same
            place, and a rank reads what it has written itself, so no rank waits for another.

    Attributes:
        kv, num_pages, layout: as given.
        format: how K and V are stored.
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
        self.format = format_of(kv)
        self._ranks = ranks if ranks and self.format.num_shards(ranks.size) == 1 else None
        self.num_pages = num_pages
        self.layout = layout
        with near_gpu(self.num_bytes) if pin else contextlib.nullcontext():
            pools = [self._allocate(part, pin=pin) for part in self.format.parts]
        self._layers = [self.format.join(layer) for layer in zip(*pools, strict=True)]

    def _allocate(self, part: StoredPart, *, pin: bool) -> Tensor:
        """``[L, P, Hkv, S, width]``, a view of memory in the order of the layout."""
        order = HOST_LAYOUTS[self.layout]
        if part.name == "scales":
            # A page's scales are only a few bytes, and contiguous in every layout.
            order = order.replace("SHD", "HSD")
        sizes = {
            "L": self.kv.num_layers,
            "P": self.num_pages,
            "S": self.kv.page_size,
            "H": self.kv.num_kv_heads,
            "D": part.width,
        }
        storage = zeros([sizes[x] for x in order], part.dtype, _CPU, pin=pin, ranks=self._ranks)
        return storage.permute([order.index(x) for x in _VIEW])

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values, scales included."""
        return self.num_pages * self.kv.page_size * self.format.token_bytes

    @property
    def rank_bytes(self) -> int:
        """This rank's share of ``num_bytes``: all of them, or a part of a shared pool."""
        return self.num_bytes // (1 if self._ranks is None else self._ranks.size)

    def layer(self, layer_id: int) -> PagedKV:
        """Keys and values of one layer, ``[P, Hkv, S, D]`` views in the stored dtype."""
        return self.stored(layer_id).kv

    def stored(self, layer_id: int) -> StoredKV:
        """Keys and values ``[P, Hkv, S, D]`` of one layer in the stored dtype, and any scales."""
        return self._layers[layer_id]

    def tokens(self, layer_id: int) -> PagedKV | None:
        """One layer as ``[slots, Hkv, D]`` views, stored dtype; None where the layout has none."""
        if self.layout != "layer_first":
            return None
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in self.layer(layer_id))
        return PagedKV(k, v)
