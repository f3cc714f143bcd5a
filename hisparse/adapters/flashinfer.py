"""FlashInfer's paged decode wrapper. https://arxiv.org/abs/2501.01005

Its plan is made on the host, from lengths that here only the device knows. So it is made once for
a number of rows, with the split over keys turned off: then no part of the plan depends on lengths,
and each call writes its page lists into the wrapper's buffers on the device. That is what a CUDA
graph needs, once the same shape has run before the capture. The price is one block per row and KV
head. ``trtllm_batch_decode_with_kv_cache`` plans nothing, but gives a log-sum-exp on sm_100 alone.

Written against flashinfer-python 0.7.2; not yet run on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hisparse.adapters.base import ADAPTERS, Attended, TableLimits
from hisparse.adapters.flashinfer_wrapper import FlashInferWrapper, make_flashinfer_call
from hisparse.adapters.libraries import import_function, to_attended
from hisparse.adapters.torch import TorchAdapter
from hisparse.errors import ConfigError
from hisparse.types import KVSpec, PagedKV, SelectionScope

__all__ = ["FlashInferAdapter"]

_WRAPPER = "BatchDecodeWithPagedKVCacheWrapper"
_PREFILL = "single_prefill_with_kv_cache"
_WIDTHS = (64, 128, 256)
#: What FlashInfer allocates once for prefill.
_PREFILL_BYTES = 32 << 20
#: Pages of a row that any wrapper has room for: 2 KiB a row, of a wrapper that takes megabytes.
_LEAST_WIDTH = 512


@ADAPTERS.register("flashinfer")
class FlashInferAdapter(TorchAdapter):
    """Decodes with FlashInfer on tensor cores; turns its lse, to base 2, into a natural one.

    There is a wrapper for each power of two of rows, each shape of pages and heads, and each power
    of two of the table's width from 512 on: only its list of pages depends on that.
    """

    fp8 = False
    scopes: tuple[SelectionScope, ...] = ("kv_head", "layer", "query_head")
    latent = (False,)
    device_types = ("cuda",)
    dtypes = (torch.bfloat16, torch.float16)

    def __init__(self) -> None:
        make, prefill = (import_function(name, "flashinfer") for name in (_WRAPPER, _PREFILL))
        if isinstance(make, str) or isinstance(prefill, str):
            raise ConfigError(f"adapter 'flashinfer': {make}")
        self._make, self._prefill = make, prefill
        self._wrappers: dict[tuple[object, ...], FlashInferWrapper] = {}

    @classmethod
    def missing(cls) -> str | None:
        found = import_function(_WRAPPER, "flashinfer")
        return found if isinstance(found, str) else None

    @classmethod
    def widths_refused(cls, kv: KVSpec) -> str | None:
        fits = kv.head_dim == kv.v_head_dim and kv.head_dim in _WIDTHS
        return None if fits else f"keys and values both {', '.join(map(str, _WIDTHS))} wide"

    @classmethod
    def workspace_bytes(cls, kv: KVSpec, tables: Sequence[TableLimits]) -> int:
        wrappers = {
            (rows, width, table.num_queries, table.num_heads, table.page_size)
            for table in tables
            for rows in _powers(_power_of_two(table.min_rows), _power_of_two(table.max_rows))
            for width in _powers(_list_width(1), _list_width(table.max_pages))
        }
        itemsize = kv.dtype.itemsize
        return _PREFILL_BYTES + sum(
            FlashInferWrapper.num_bytes(rows, rows * width, queries * kv.head_dim * itemsize)
            for rows, width, queries, *_ in wrappers
        )

    def attend(
        self, q: Tensor, kv: PagedKV, page_table: Tensor, seq_lens: Tensor, scale: float
    ) -> Attended:
        call = make_flashinfer_call(q, kv, page_table, seq_lens)
        rows, width = _power_of_two(page_table.shape[0]), _list_width(page_table.shape[1])
        key = (rows, width, q.shape[1:], call.k.shape[1:], call.k.dtype, scale)
        if key not in self._wrappers:
            self._wrappers[key] = FlashInferWrapper(self._make, rows, rows * width, call, scale)
        return to_attended(*self._wrappers[key].run(call), seq_lens, base_2=True)

    def attend_prefill(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool
    ) -> Attended:
        if k.shape[-1] != v.shape[-1]:
            return super().attend_prefill(q, k, v, scale, causal=causal)
        out, lse = self._prefill(
            q.to(k.dtype), k, v, causal=causal, sm_scale=scale, backend="fa2", return_lse=True
        )
        return Attended(out.float(), lse * math.log(2))


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _list_width(num_pages: int) -> int:
    return max(_LEAST_WIDTH, _power_of_two(num_pages))


def _powers(least: int, most: int) -> Iterator[int]:
    """Powers of two, both bounds included."""
    while least <= most:
        yield least
        least *= 2
