"""Holds FlashInfer's decode wrapper with its buffers, and fills its page lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hisparse.adapters.libraries import token_major
from hisparse.types import AttentionRule, PagedKV


@dataclass(frozen=True, kw_only=True)
class FlashInferCall:
    """Inputs of one call of FlashInfer's ``run``, by FlashInfer's names.

    Attributes:
        q: ``[R, Q, D]``, in the pages' dtype.
        k, v: ``[N, S, Hr, D]``, layout "NHD"; views of the pages.
        indptr: ``[R + 1] int32``, offset of each row's pages in ``indices``.
        indices: ``[R * P] int32``, pages of all rows in order, padded with zeros.
        last_page_len: ``[R] int32``, tokens in each row's last page, 1 to S.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


def make_flashinfer_call(
    q: Tensor, kv: PagedKV, page_table: Tensor, seq_lens: Tensor
) -> FlashInferCall:
    """Convert :meth:`BackendAdapter.attend`'s arguments on the device, without a device sync.

    Each row becomes one sequence, as in :mod:`hisparse.adapters.flash_attention`. A row without
    tokens has no pages.
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


#: Device memory that FlashInfer allocates for a wrapper's plan. It also allocates as much
#: page-locked host memory.
_PLAN_BYTES = 8 << 20
#: Workspace that FlashInfer requires for the results of splits, although splits are turned off.
_SPLIT_BYTES = 1 << 20


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
            Output ``[R, Q, D]`` and lse ``[R, Q]`` with base 2.
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
