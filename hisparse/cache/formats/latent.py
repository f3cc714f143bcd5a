"""Latents (MLA): the key of a token is its only tensor."""

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from hisparse.cache.formats.base import KVFormat, StoredPart
from hisparse.cache.formats.plain import Plain
from hisparse.config import LATENT_FORMATS
from hisparse.types import SelectionScope, StoredKV


class LatentFormat(KVFormat):
    """The value is the first columns of the key; one latent serves all query heads."""

    scopes: ClassVar[tuple[SelectionScope, ...]] = ("layer", "kv_head")
    attention_name = "latent attention (MLA)"

    @cached_property
    def parts(self) -> tuple[StoredPart, ...]:
        return (StoredPart("k", self.key_width, self.dtype),)

    def num_shards(self, ranks: int) -> int:
        return 1  # Every rank stores all of it, because all heads share one latent.

    def join(self, tensors: Sequence[Tensor]) -> StoredKV:
        (k,) = tensors
        return StoredKV(k, self.values_of(k, k))

    def values_of(self, k: Tensor, v: Tensor) -> Tensor:
        return k[..., : self.kv.v_head_dim]


@LATENT_FORMATS.register("auto")
class Latent(LatentFormat, Plain):
    """Latents in the model's dtype, as the model computes them."""
