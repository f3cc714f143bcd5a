"""The contract of storage formats, and the table of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import ClassVar, NamedTuple, get_args

import torch
from torch import Tensor

from hisparse.adapters import Attended, BackendAdapter
from hisparse.cache.allocate import zeros
from hisparse.config import FORMATS
from hisparse.kernels import HostKeys, dequantize, quantize
from hisparse.kernels.operation import new_tensors
from hisparse.types import AttentionRule, KVSpec, PagedKV, SelectionScope, StoredKV

#: ``BackendAdapter.attend``.
Attend = Callable[[Tensor, StoredKV, Tensor, Tensor, AttentionRule], Attended]

#: Takes ``[N, Hr, S, D]`` pages and the ``[n] int32`` ones to decode, -1 for none; returns decoded
#: pages, and the index there of each.
PageDecoder = Callable[[StoredKV, Tensor], tuple[StoredKV, Tensor]]


class StoredPart(NamedTuple):
    """A tensor of a format, for one token and KV head.

    Attributes:
        name: the field of :class:`StoredKV`.
        width: elements.
        dtype: of the elements.
    """

    name: str
    width: int
    dtype: torch.dtype


class KVFormat(ABC):
    """How a model's keys and values are stored: on the device, in host memory and in a store.

    A subclass states the shapes of what is stored, and converts to and from the model's dtype.
    Pools, transfers, sizing and stores ask nothing else.

    Args:
        kv: shapes of the model.

    Attributes:
        kv: as given.
    """

    #: Launches that conversions add to a captured layer, for estimates of its time.
    captured_launches: ClassVar[int] = 16
    #: Selection scopes of attention over its pages.
    scopes: ClassVar[tuple[SelectionScope, ...]] = get_args(SelectionScope)
    #: The attention whose K and V it stores, in messages; "": MHA and GQA.
    attention_name: ClassVar[str] = ""
    #: Dtype of SGLang's own pool if ``--kv-cache-dtype`` has this choice; None: it has not.
    sglang_dtype: ClassVar[torch.dtype | None] = None

    def __init__(self, kv: KVSpec) -> None:
        self.kv = kv

    @property
    @abstractmethod
    def name(self) -> str:
        """Of the bytes, in a store: pages of another name are not read."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of stored keys and values."""

    @property
    def key_width(self) -> int:
        """Stored elements of a key."""
        return self.kv.head_dim

    @cached_property
    def parts(self) -> tuple[StoredPart, ...]:
        """The tensors that have memory of their own, in the order of a store."""
        widths = {"k": self.key_width, "v": self.kv.v_head_dim}
        return tuple(StoredPart(name, width, self.dtype) for name, width in widths.items())

    @property
    def head_bytes(self) -> int:
        """Bytes of K and V of one token and KV head in one layer, with scales."""
        return sum(part.width * part.dtype.itemsize for part in self.parts)

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer, all KV heads."""
        return self.kv.num_kv_heads * self.head_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return self.kv.num_layers * self.layer_token_bytes

    @cached_property
    def plain(self) -> KVFormat:
        """The format of the same K and V in the model's dtype."""
        return format_of(replace(self.kv, kv_cache_dtype="auto"))

    @property
    def decoded_token_bytes(self) -> int:
        """Bytes of one token in one layer that is decoded into memory of its own; 0: none is."""
        return self.plain.layer_token_bytes

    def decoded_pages(self, count: int, device: torch.device) -> PagedKV | None:
        """Memory for ``count`` decoded pages, model's dtype; None if K and V are read as stored."""
        plain = self.plain
        return plain.join(plain.new_pages((count,), self.kv.num_kv_heads, device)).kv

    @property
    def dense_token_bytes(self) -> int:
        """Bytes of one token in all layers in SGLang's own KV cache."""
        return self.plain.token_bytes

    def num_shards(self, ranks: int) -> int:
        """Parts that ``ranks`` ranks of tensor parallelism divide K and V into: one for each."""
        return ranks

    def new_pages(self, leading: Sequence[int], heads: int, device: torch.device) -> list[Tensor]:
        """Zeroed pages of each part, ``[*leading, heads, S, width]`` in the dtype of the part.

        The heads of a token lie side by side. A page's scales, only a few bytes, are contiguous.
        """
        pages, size = [], self.kv.page_size
        for part in self.parts:
            if part.name == "scales":
                pages.append(zeros((*leading, heads, size, part.width), part.dtype, device))
            else:
                memory = zeros((*leading, size, heads, part.width), part.dtype, device)
                pages.append(memory.transpose(-3, -2))
        return pages

    def join(self, tensors: Sequence[Tensor]) -> StoredKV:
        """The tensors of :attr:`parts`, ``[..., width]`` in their dtypes, as K, V and scales."""
        return StoredKV(*tensors)

    def split(self, stored: StoredKV) -> tuple[Tensor, ...]:
        """The tensors of :attr:`parts`, ``[..., width]`` each, in the dtypes there."""
        return tuple(getattr(stored, part.name) for part in self.parts)

    def values_of(self, k: Tensor, v: Tensor) -> Tensor:
        """The values of tokens, any dtype: ``v [..., Dv]``, or columns of ``k [..., Dk]``."""
        return v

    @abstractmethod
    def encode(self, k: Tensor, v: Tensor) -> StoredKV:
        """Convert ``k [..., Dk]``, ``v [..., Dv]`` from the model's dtype to the stored dtypes."""

    @abstractmethod
    def decode(self, stored: StoredKV, out: PagedKV | None = None) -> PagedKV:
        """Convert stored keys and values ``[..., D]`` to the model's dtype.

        Args:
            stored: tokens or pages.
            out: ``[..., D]``, receives the result if a conversion is needed; None: allocate it.
        """

    def as_read(self, k: Tensor, v: Tensor) -> PagedKV:
        """Round ``k [..., Dk]``, ``v [..., Dv]``, model's dtype, to what a later read returns."""
        return self.decode(self.encode(k, v))

    @classmethod
    def scaled_name(cls, kv_cache_dtype: str) -> str | None:
        """``kv_cache_dtype``, its own, if attention takes its scales; None: it has none."""
        return None

    def host_keys(self, stored: StoredKV) -> HostKeys:
        """The keys of a pool, ``[host pages, Hkv, S, width]``, for kernels that score them."""
        return HostKeys(stored.k, stored.scales)

    def copied_parts(self, stored: StoredKV) -> tuple[Tensor, ...]:
        """:meth:`split` and its dtypes if copies of pages need no conversion; else no tensors."""
        return ()

    def page_decoder(self) -> PageDecoder | None:
        """What decodes pages that kernels cannot read, or None if they read all in place."""
        return None

    def attend_with(self, adapter: BackendAdapter, max_pages: int) -> Attend:
        """What attends ``q [R, Q, D]`` over device pages: it is called as ``adapter.attend``.

        Args:
            adapter: the attention library.
            max_pages: the most full pages of a selection: what is decoded at once, if anything is.
        """
        return adapter.attend

    def attend_bytes(self, max_pages: int) -> int:
        """Device memory that :meth:`attend_with`'s attention takes for each request."""
        return 0


class ScaledFormat(KVFormat):
    """One scale for each token's key and value of a head. Kernels multiply by it as they attend.

    A subclass states the dtype, which :func:`hisparse.kernels.quantize` and
    :func:`hisparse.kernels.paged_attention` have to take.
    """

    @property
    def name(self) -> str:
        return self.kv.kv_cache_dtype

    @cached_property
    def parts(self) -> tuple[StoredPart, ...]:
        return (*super().parts, StoredPart("scales", 2, torch.uint8))

    @classmethod
    def scaled_name(cls, kv_cache_dtype: str) -> str | None:
        return kv_cache_dtype

    @property
    def dense_token_bytes(self) -> int:
        if self.sglang_dtype is None:
            return super().dense_token_bytes
        # SGLang stores no scales.
        return self.token_bytes - self.parts[-1].width * self.kv.num_kv_heads * self.kv.num_layers

    def encode(self, k: Tensor, v: Tensor) -> StoredKV:
        return quantize(k, v, self.dtype)

    def decode(self, stored: StoredKV, out: PagedKV | None = None) -> PagedKV:
        if out is None:
            shapes = [(x.shape, self.kv.dtype) for x in stored.kv]
            out = PagedKV(*new_tensors("decode", shapes, stored.k.device))
        dequantize(stored, out)
        return out


def sglang_choices() -> dict[str, torch.dtype]:
    """Names of formats that SGLang's ``--kv-cache-dtype`` has, with the dtype of its own pool."""
    dtypes = {x: each.get(x).sglang_dtype for each in FORMATS.values() for x in each}
    return {name: dtype for name, dtype in dtypes.items() if dtype is not None}


@cache
def format_of(kv: KVSpec) -> KVFormat:
    """The format that ``kv.kv_cache_dtype`` names.

    Raises:
        ConfigError: the model's attention has no such format; the message names those that it has.
    """
    made: KVFormat = FORMATS[kv.attention].get(kv.kv_cache_dtype)(kv)
    return made
