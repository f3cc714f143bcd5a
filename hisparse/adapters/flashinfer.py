"""FlashInfer's paged decode wrapper. https://arxiv.org/abs/2501.01005

FlashInfer's ``plan`` runs on the host and takes lengths, but lengths of selections are known only
on the device. The adapter therefore plans once per number of rows, with the split over keys turned
off. Such a plan does not depend on lengths: each call only writes its page lists into the wrapper's
device buffers. CUDA graphs can capture such a call if the same shape ran before the capture. The
cost is that one thread block handles a whole row and KV head.

``trtllm_batch_decode_with_kv_cache`` needs no plan, but returns a log-sum-exp only on sm_100.
Written against flashinfer-python 0.7.2, which has run on an H200.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hisparse.adapters.base import ADAPTERS, Attended, TableLimits
from hisparse.adapters.libraries import LibraryAdapter, to_attended, token_major
from hisparse.types import AttentionRule, KVSpec, Pages

_WIDTHS = (64, 128, 256)
#: Device memory that FlashInfer allocates once for prefill, bytes.
_PREFILL_BYTES = 32 << 20
#: Minimum pages per row of a wrapper: 2 KiB per row, little beside the wrapper's megabytes.
_MIN_LIST_WIDTH = 512
#: Device memory that FlashInfer allocates for a wrapper's plan. It also allocates as much
#: page-locked host memory.
_PLAN_BYTES = 8 << 20
#: Workspace that FlashInfer requires for the results of splits, although splits are turned off.
_SPLIT_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FlashInferCall:
    """Inputs of one call of FlashInfer's ``run``, by FlashInfer's names."""

    q: Tensor  # ``[R, Q, D]``, in the pages' dtype
    # ``[N, S, Hr, D]``, layout "NHD"; views of the pages
    k: Tensor
    v: Tensor
    indptr: Tensor  # ``[R + 1] int32``, offset of each row's pages in ``indices``
    indices: Tensor  # ``[R * P] int32``, pages of all rows in order, padded with zeros
    last_page_len: Tensor  # ``[R] int32``, tokens in each row's last page, 1 to S


def make_flashinfer_call(
    q: Tensor, kv: Pages, page_table: Tensor, seq_lens: Tensor
) -> FlashInferCall:
    """Convert :meth:`BackendAdapter.attend`'s arguments on the device, without a device sync.

    Each row becomes one sequence, as in :mod:`hisparse.adapters.flash_attention`. A row without
    tokens has no pages.

    Args:
        q, kv, page_table, seq_lens: shapes and dtypes as for ``attend``.
    """
    (rows, width), size = page_table.shape, kv.k.shape[2]
    counts = (seq_lens + (size - 1)) // size
    indptr = seq_lens.new_zeros(rows + 1)
    torch.cumsum(counts, 0, dtype=torch.int32, out=indptr[1:])
    column = torch.arange(width, dtype=torch.int32, device=q.device)
    # Padding entries go to one extra element at the end.
    target = torch.where(column < counts[:, None], indptr[:-1, None] + column, rows * width)
    indices = page_table.new_zeros(rows * width + 1)
    indices.scatter_(0, target.flatten().long(), page_table.flatten())
    return FlashInferCall(
        q=q.to(kv.k.dtype).contiguous(),
        k=token_major(kv.k),
        v=token_major(kv.v),
        indptr=indptr,
        indices=indices[:-1],
        last_page_len=(seq_lens - 1) % size + 1,
    )


def rule_options(rule: AttentionRule, left: int) -> dict[str, float | int | None]:
    """A rule as arguments of FlashInfer.

    Args:
        rule: scale, cap and window.
        left: tokens before its own position that a query attends; -1: all.
    """
    return {
        "sm_scale": rule.scale,
        "logits_soft_cap": rule.logit_cap or None,
        "window_left": left,
    }


class FlashInferWrapper:
    """FlashInfer's ``BatchDecodeWithPagedKVCacheWrapper``, planned for a fixed number of rows.

    Args:
        make: FlashInfer's class.
        rows: rows that the wrapper is planned for; calls may have fewer.
        max_pages: size of the page list, over all rows.
        call: a call with the shapes and dtypes to plan for.
        rule: scale, cap and window.
    """

    @staticmethod
    def num_bytes(rows: int, max_pages: int, query_bytes: int) -> int:
        """Device memory of a wrapper, in bytes.

        Args:
            rows, max_pages: as for the class.
            query_bytes: bytes of one row's queries.
        """
        # FlashInfer keeps a second list of rows + 1 entries: the offsets of each row's queries.
        lists = 4 * (2 * (rows + 1) + rows + max_pages)
        return _PLAN_BYTES + _SPLIT_BYTES + lists + rows * query_bytes

    def __init__(
        self, make: Any, rows: int, max_pages: int, call: FlashInferCall, rule: AttentionRule
    ) -> None:
        device, (size, kv_heads, width) = call.q.device, call.k.shape[1:]

        def buffer(length: int) -> Tensor:
            return torch.zeros(length, dtype=torch.int32, device=device)

        self._q = call.q.new_zeros(rows, *call.q.shape[1:])
        self._indptr, self._last = buffer(rows + 1), buffer(rows)
        self._indices = buffer(max_pages)
        self._wrapper = make(
            torch.zeros(_SPLIT_BYTES, dtype=torch.uint8, device=device),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=self._indptr,
            paged_kv_indices_buffer=self._indices,
            paged_kv_last_page_len_buffer=self._last,
            backend="fa2",
        )
        # Plans with one page per row; without a split the plan holds for all lengths.
        self._wrapper.plan(
            torch.arange(rows + 1, dtype=torch.int32),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.ones(rows, dtype=torch.int32),
            call.q.shape[1],
            kv_heads,
            width,
            size,
            q_data_type=call.q.dtype,
            kv_data_type=call.k.dtype,
            **rule_options(rule, rule.window - 1),
            disable_split_kv=True,
        )

    def run(self, call: FlashInferCall) -> tuple[Tensor, Tensor]:
        """Run FlashInfer on a call of at most ``rows`` rows.

        Returns:
            Output ``[R, Q, D]`` in the dtype of ``call.q``, and lse ``[R, Q] float32`` with base 2.
        """
        rows = len(call.q)
        self._q[:rows] = call.q
        self._indptr[: rows + 1] = call.indptr
        # The remaining rows of the plan get no pages.
        self._indptr[rows + 1 :] = call.indptr[-1]
        self._indices[: call.indices.numel()] = call.indices
        self._last[:rows] = call.last_page_len
        out, lse = self._wrapper.run(self._q, (call.k, call.v), return_lse=True)
        return out[:rows], lse[:rows]


@ADAPTERS.register("flashinfer")
class FlashInferAdapter(LibraryAdapter):
    """Decodes and prefills with FlashInfer; converts its lse from base 2 to a natural lse.

    The adapter keeps one wrapper for each rule, each shape of pages and heads, each number of rows
    rounded up to a power of two, and each table width rounded up to a power of two from 512 on.
    """

    name = "flashinfer"
    functions = ("BatchDecodeWithPagedKVCacheWrapper", "single_prefill_with_kv_cache")
    modules = ("flashinfer",)
    attention = ("GQA",)

    def __init__(self) -> None:
        super().__init__()
        self._wrappers: dict[tuple[object, ...], FlashInferWrapper] = {}

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
        self, q: Tensor, kv: Pages, page_table: Tensor, seq_lens: Tensor, rule: AttentionRule
    ) -> Attended:
        call = make_flashinfer_call(q, kv, page_table, seq_lens)
        rows, width = _round_up(page_table.shape[0]), _list_width(page_table.shape[1])
        key = (rows, width, q.shape[1:], call.k.shape[1:], call.k.dtype, rule)
        if key not in self._wrappers:
            self._wrappers[key] = FlashInferWrapper(
                self._functions[0], rows, rows * width, call, rule
            )
        return to_attended(*self._wrappers[key].run(call), seq_lens, base_2=True)

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule, causal: bool, left: int
    ) -> Attended:
        options = {**rule_options(rule, left), "backend": "fa2", "return_lse": True}
        out, lse = self._functions[1](q, k, v, causal=causal, **options)
        return Attended(out, lse * math.log(2))


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
