"""Keys and values in the model's dtype."""

import torch
from torch import Tensor

from hisparse.cache.formats.base import KVFormat
from hisparse.config import KV_FORMATS
from hisparse.types import PagedKV, StoredKV


@KV_FORMATS.register("auto")
class Plain(KVFormat):
    """Stores K and V as the model computes them."""

    captured_launches = 0
    decoded_token_bytes = 0

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def dtype(self) -> torch.dtype:
        return self.kv.dtype

    def encode(self, k: Tensor, v: Tensor) -> StoredKV:
        return StoredKV(k, v)

    def decoded_pages(self, count: int, device: torch.device) -> PagedKV | None:
        return None

    def decode(self, stored: StoredKV, out: PagedKV | None = None) -> PagedKV:
        return stored.kv

    def copied_parts(self, stored: StoredKV) -> tuple[Tensor, ...]:
        return (stored.k, stored.v)[: len(self.parts)]
