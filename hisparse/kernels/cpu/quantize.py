"""Eight-bit keys and values in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.build.cpu import call_cpu, dense_rows
from hisparse.types import StoredKV

__all__ = ["quantize"]


def quantize(k: Tensor, v: Tensor, dtype: torch.dtype) -> StoredKV:
    """See :func:`hisparse.kernels.quantize`."""
    codes = [torch.empty(x.shape, dtype=dtype, device=x.device) for x in (k, v)]
    scales = torch.empty((*k.shape[:-1], 2), dtype=torch.uint8, device=k.device)
    call_cpu(
        "quantize",
        *(dense_rows(_vectors(x)) for x in (k, v)),
        *(_vectors(x) for x in (*codes, scales)),
    )
    return StoredKV(codes[0], codes[1], scales)


def _vectors(x: Tensor) -> Tensor:
    """``[..., H, D]`` -> ``[T, H, D]``, a view, or a copy if strides do not allow one."""
    return x.reshape(-1, *x.shape[-2:])
