"""Keys and values in eight bits, with a power of two as scale for each token and head.

A scale brings a vector into the range of the stored dtype. One byte holds the power of two (E8M0,
as in https://arxiv.org/abs/2310.10537). Decoded values are exact in float32, bfloat16 and float16
alike, and storing them again gives the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.checks import check_once, check_tensor
from hisparse.kernels.dispatch import implementation
from hisparse.kernels.reference.quantize import RULES
from hisparse.types import StoredKV

__all__ = ["QUANTIZED", "dequantize", "quantize"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: Dtypes of keys and values that have scales: float8_e4m3fn and int8.
QUANTIZED = tuple(RULES)


def quantize(k: Tensor, v: Tensor, dtype: torch.dtype, *, impl: str = "auto") -> StoredKV:
    """Round to ``dtype``, to the nearest and ties to even, under the scale of each vector.

    Magnitudes of float16 have a limit, because the next number under their scale, 65536, is beyond
    float16: 61440 in e4m3, 65024 in int8. In int8 NaN becomes 0.

    Args:
        k: ``[..., Dk]`` float32, bfloat16 or float16.
        v: ``[..., Dv]``, other dimensions and dtype as ``k``.
        dtype: one of ``QUANTIZED``.
        impl: "auto", or an implementation's name.

    Returns:
        K and V in ``dtype``, contiguous, and their scales.

    Raises:
        KernelError: a tensor has another shape, dtype or device.
    """
    check_once(_check_quantize, k, v, values=(dtype,))
    stored: StoredKV = implementation(impl, k.device).quantize(k, v, dtype)
    return stored


def dequantize(stored: StoredKV, out: tuple[Tensor, Tensor], *, impl: str = "auto") -> None:
    """Decode the result of :func:`quantize`.

    Args:
        stored: keys, values and scales, any strides.
        out: K and V, ``[..., D]`` as in ``stored``, float32, bfloat16 or float16. Written to.
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape or dtype.
    """
    check_once(_check_dequantize, *stored.kv, stored.scales, *out)
    implementation(impl, stored.k.device, out[0].device).dequantize(stored, out)


def _check_quantize(k: Tensor, v: Tensor, dtype: torch.dtype) -> None:
    check_tensor("k", k, _FLOATS, (*k.shape[:-1], None))
    check_tensor("v", v, k.dtype, (*k.shape[:-1], None), k.device)
    if dtype not in QUANTIZED:
        raise KernelError(f"dtype: got {dtype}, expected one of {', '.join(map(str, QUANTIZED))}")


def _check_dequantize(
    k: Tensor, v: Tensor, scales: Tensor | None, k_out: Tensor, v_out: Tensor
) -> None:
    if scales is None:
        raise KernelError(f"scales: got None, expected the scales of {k.dtype} keys and values")
    vectors, device = k.shape[:-1], k.device
    check_tensor("k", k, QUANTIZED, (*vectors, None))
    check_tensor("v", v, k.dtype, (*vectors, None), device)
    check_tensor("scales", scales, torch.uint8, (*vectors, 2), device)
    check_tensor("out.k", k_out, _FLOATS, k.shape)
    check_tensor("out.v", v_out, _FLOATS, v.shape, k_out.device)
