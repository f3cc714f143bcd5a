"""FlashInfer's dense decode attention over pages; CUDA only.

It has not been run on a GPU yet: the benchmark compares its output with SDPA's and leaves it out if
they differ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hisparse.types import PagedKV

__all__ = ["flashinfer_decode"]

_WORKSPACE_BYTES = 256 << 20


def flashinfer_decode(
    kv: PagedKV, q_heads: int, page_size: int, scale: float
) -> Callable[[Tensor], Tensor]:
    """A function ``q [B, Hq, D] -> [B, Hq, D]`` over whole contexts.

    Args:
        kv: ``[B, Hkv, S, D]``, S a multiple of ``page_size``.
        q_heads: Hq.
        page_size: tokens of a page.
        scale: softmax scale.

    Raises:
        ImportError: FlashInfer is not installed.
    """
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    batch, kv_heads, length, width = kv.k.shape
    device, per_request = kv.k.device, length // page_size
    # [B * P, page, Hkv, D]: "NHD", a request's pages one after the other.
    pages = tuple(x.transpose(1, 2).reshape(-1, page_size, kv_heads, width) for x in kv)
    ends = torch.arange(batch + 1, dtype=torch.int32, device=device) * per_request
    indices = torch.arange(batch * per_request, dtype=torch.int32, device=device)
    full = torch.full((batch,), page_size, dtype=torch.int32, device=device)
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    dtype = kv.k.dtype
    wrapper.plan(
        ends,
        indices,
        full,
        q_heads,
        kv_heads,
        width,
        page_size,
        sm_scale=scale,
        q_data_type=dtype,
        kv_data_type=dtype,
    )
    return lambda q: wrapper.run(q, pages)
