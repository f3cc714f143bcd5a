"""FlashInfer's dense decode attention over pages; CUDA only.

It has not been run on a GPU yet: the benchmark compares its output with SDPA's and leaves it out if
they differ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hisparse.types import PagedKV

_WORKSPACE_BYTES = 256 << 20


def as_pages(kv: PagedKV, page_size: int) -> PagedKV:
    """``[B, Hkv, S, D]`` as ``[B * P, page, Hkv, D]``: a request's pages one after the other."""
    kv_heads, width = kv.k.shape[1], kv.k.shape[3]
    return PagedKV(*(x.transpose(1, 2).reshape(-1, page_size, kv_heads, width) for x in kv))


def flashinfer_decode(
    pages: PagedKV, batch: int, q_heads: int, scale: float, *, tensor_cores: bool
) -> Callable[[Tensor], Tensor]:
    """A function ``q [B, Hq, D] -> [B, Hq, D]`` over whole contexts.

    Args:
        pages: ``[B * P, page, Hkv, D]``, from :func:`as_pages`.
        batch: B.
        q_heads: Hq.
        scale: softmax scale.
        tensor_cores: whether queries that share a KV head are multiplied as a matrix.

    Raises:
        ImportError: FlashInfer is not installed.
    """
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    count, page_size, kv_heads, width = pages.k.shape
    device, dtype = pages.k.device, pages.k.dtype
    ends = torch.arange(batch + 1, dtype=torch.int32, device=device) * (count // batch)
    indices = torch.arange(count, dtype=torch.int32, device=device)
    full = torch.full((batch,), page_size, dtype=torch.int32, device=device)
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
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
    return lambda q: wrapper.run(q, tuple(pages))
