"""FlashInfer's paged decode wrapper. https://arxiv.org/abs/2501.01005

FlashInfer's ``plan`` runs on the host and takes lengths, but lengths of selections are known only
on the device. The adapter therefore plans once per number of rows, with the split over keys turned
off. Such a plan does not depend on lengths: each call only writes its page lists into the wrapper's
device buffers. CUDA graphs can capture such a call if the same shape ran before the capture. The
cost is that one thread block handles a whole row and KV head.

``trtllm_batch_decode_with_kv_cache`` needs no plan, but returns a log-sum-exp only on sm_100.
Written against flashinfer-python 0.7.2; not yet run on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hisparse.adapters.base import ADAPTERS, Attended, TableLimits
from hisparse.adapters.flashinfer_wrapper import (
    FlashInferWrapper,
    make_flashinfer_call,
    rule_options,
)
from hisparse.adapters.libraries import import_function, prefill_in_window, to_attended
from hisparse.adapters.torch import TorchAdapter
from hisparse.errors import ConfigError
from hisparse.types import AttentionRule, KVSpec, PagedKV, SelectionScope

_WRAPPER = "BatchDecodeWithPagedKVCacheWrapper"
_PREFILL = "single_prefill_with_kv_cache"
_WIDTHS = (64, 128, 256)
#: Device memory that FlashInfer allocates once for prefill, bytes.
_PREFILL_BYTES = 32 << 20
#: Minimum pages per row of a wrapper: 2 KiB per row, little beside the wrapper's megabytes.
_MIN_LIST_WIDTH = 512


@ADAPTERS.register("flashinfer")
class FlashInferAdapter(TorchAdapter):
    """Decodes and prefills with FlashInfer; converts its lse from base 2 to a natural lse.

    The adapter keeps one wrapper for each rule, each shape of pages and heads, each number of rows
    rounded up to a power of two, and each table width rounded up to a power of two from 512 on.
    """

    scaled = False
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
            (rows, width, table.num_queries, table.num_heads, table.page_size, table.window)
            for table in tables
            for rows in _powers_of_two(_round_up(table.min_rows), _round_up(table.max_rows))
            for width in _powers_of_two(_list_width(1), _list_width(table.max_pages))
        }
        itemsize = kv.dtype.itemsize
        return _PREFILL_BYTES + sum(
            FlashInferWrapper.num_bytes(rows, rows * width, queries * kv.head_dim * itemsize)
            for rows, width, queries, *_ in wrappers
        )

    def attend(
        self, q: Tensor, kv: PagedKV, page_table: Tensor, seq_lens: Tensor, rule: AttentionRule
    ) -> Attended:
        call = make_flashinfer_call(q, kv, page_table, seq_lens)
        rows, width = _round_up(page_table.shape[0]), _list_width(page_table.shape[1])
        key = (rows, width, q.shape[1:], call.k.shape[1:], call.k.dtype, rule)
        if key not in self._wrappers:
            self._wrappers[key] = FlashInferWrapper(self._make, rows, rows * width, call, rule)
        return to_attended(*self._wrappers[key].run(call), seq_lens, base_2=True)

    def attend_prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: AttentionRule,
        *,
        causal: bool,
        first_key: int = 0,
    ) -> Attended:
        if k.shape[-1] != v.shape[-1]:
            return super().attend_prefill(q, k, v, rule, causal=causal, first_key=first_key)

        def attend(queries: Tensor, left: int) -> Attended:
            options = rule_options(rule, left)
            out, lse = self._prefill(
                queries, k, v, causal=causal, **options, backend="fa2", return_lse=True
            )
            return Attended(out, lse * math.log(2))

        return prefill_in_window(attend, q.to(k.dtype), k, v, rule, first_key)


def _round_up(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(number - 1, 0).bit_length()


def _list_width(num_pages: int) -> int:
    """Pages per row of the wrapper for tables of ``num_pages`` pages."""
    return max(_MIN_LIST_WIDTH, _round_up(num_pages))


def _powers_of_two(first: int, last: int) -> Iterator[int]:
    """Powers of two from ``first`` to ``last``, both included."""
    while first <= last:
        yield first
        first *= 2
