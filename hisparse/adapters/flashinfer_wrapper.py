"""FlashInfer's wrapper: its lists of pages, one after the other, and how it is planned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hisparse.adapters.libraries import token_major
from hisparse.types import PagedKV

__all__ = ["FlashInferCall", "FlashInferWrapper", "make_flashinfer_call"]


@dataclass(frozen=True, kw_only=True)
class FlashInferCall:
    """What ``run`` reads: its arguments, and the wrapper's buffers.

    Attributes:
        q: ``[R, Q, D]``, the pages' dtype.
        k, v: ``[N, S, Hr, D]``, layout "NHD"; views of the pages.
        indptr: ``[R + 1] int32``, where each row's pages begin in ``indices``.
        indices: ``[R * P] int32``, the rows' pages one after the other, then zeros.
        last_page_len: ``[R] int32``, tokens in a row's last page, 1 to S.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


def make_flashinfer_call(q: Tensor, kv: PagedKV, page_table: Tensor, seq_lens: Tensor) -> FlashInferCall:
    """The call for :meth:`BackendAdapter.attend`'s arguments, by operations on their device.

    A row is a sequence, as in :mod:`hisparse.adapters.flash_attention`; one of no tokens has no
    pages.
    """
    (rows, width), size = page_table.shape, kv.k.shape[2]
    counts = (seq_lens + (size - 1)) // size
    indptr = seq_lens.new_zeros(rows + 1)
    torch.cumsum(counts, 0, dtype=torch.int32, out=indptr[1:])
    column = torch.arange(width, dtype=torch.int32, device=q.device)
    # What is no page goes to a place of its own, behind all that may be pages.
    place = torch.where(column < counts[:, None], indptr[:-1, None] + column, rows * width)
    indices = page_table.new_zeros(rows * width + 1)
    indices.scatter_(0, place.flatten().long(), page_table.flatten())
    return FlashInferCall(
        q=q.to(kv.k.dtype).contiguous(),
        k=token_major(kv.k),
        v=token_major(kv.v),
        indptr=indptr,
        indices=indices[:-1],
        last_page_len=(seq_lens - 1) % size + 1,
    )


#: What FlashInfer allocates for a wrapper's plan, on the device and as much in page-locked memory.
_PLAN_BYTES = 8 << 20
#: What it is given for the results of splits, of which there are none.
_SPLIT_BYTES = 1 << 20


class FlashInferWrapper:
    """A wrapper that is planned for up to ``rows`` rows and ``entries`` pages, no fewer."""

    @staticmethod
    def num_bytes(rows: int, entries: int, query_bytes: int) -> int:
        """Device memory of one, where a row's queries take ``query_bytes``."""
        # FlashInfer's own list of where each row's queries begin is the second of rows + 1.
        lists = 4 * (2 * (rows + 1) + rows + entries)
        return _PLAN_BYTES + _SPLIT_BYTES + lists + rows * query_bytes

    def __init__(
        self, make: Any, rows: int, entries: int, call: FlashInferCall, scale: float
    ) -> None:
        device, (size, kv_heads, width) = call.q.device, call.k.shape[1:]

        def buffer(length: int) -> Tensor:
            return torch.zeros(length, dtype=torch.int32, device=device)

        self._q = call.q.new_zeros(rows, *call.q.shape[1:])
        self._indptr, self._last = buffer(rows + 1), buffer(rows)
        self._indices = buffer(entries)
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
        # A page for each row: what it is planned for says nothing of what it is run for.
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
            sm_scale=scale,
            disable_split_kv=True,
        )

    def run(self, call: FlashInferCall) -> tuple[Tensor, Tensor]:
        """Out ``[R, Q, D]`` and lse ``[R, Q]`` to base 2."""
        rows = len(call.q)
        self._q[:rows] = call.q
        self._indptr[: rows + 1] = call.indptr
        # Rows that the plan has and the call has not get no pages.
        self._indptr[rows + 1 :] = call.indptr[-1]
        self._indices[: call.indices.numel()] = call.indices
        self._last[:rows] = call.last_page_len
        out, lse = self._wrapper.run(self._q, (call.k, call.v), return_lse=True)
        return out[:rows], lse[:rows]
