"""Keys and values in eight bits: e4m3 with a power of two as scale for each token and head.

A scale brings a vector into the range of e4m3; the exponents of e4m3 cover the rest. So a power of
two in one byte is enough (E8M0, as in https://arxiv.org/abs/2310.10537). Decoded values are exact
in float32, bfloat16 and float16 alike, and encoding them again gives the same bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.checks import check_once, check_tensor
from hisparse.kernels.dispatch import implementation
from hisparse.types import StoredKV

__all__ = ["decode_fp8", "encode_fp8"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def encode_fp8(k: Tensor, v: Tensor, *, impl: str = "auto") -> StoredKV:
    """Round to e4m3, to the nearest and ties to even, under the scale of each vector.

    float16 magnitudes above 61440 become 61440, because the next number under their scale, 65536,
    is beyond float16.

    Args:
        k: ``[..., Dk]`` float32, bfloat16 or float16.
        v: ``[..., Dv]``, other dimensions and dtype as ``k``.
        impl: "auto", or an implementation's name.

    Returns:
        K and V as float8_e4m3fn, contiguous, and their scales.

    Raises:
        KernelError: a tensor has another shape, dtype or device.
    """
    check_once(_check_encode, k, v)
    module = implementation(impl, k.device)
    stored: StoredKV = module.encode_fp8(k, v)
    return stored


def decode_fp8(stored: StoredKV, out: tuple[Tensor, Tensor], *, impl: str = "auto") -> None:
    """Decode the result of :func:`encode_fp8`.

    Args:
        stored: float8_e4m3fn with scales, any strides.
        out: K and V, ``[..., D]`` as in ``stored``, float32, bfloat16 or float16. Written to.
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape or dtype.
    """
    check_once(_check_decode, *stored.kv, stored.scales, *out)
    implementation(impl, stored.k.device, out[0].device).decode_fp8(stored, out)


def _check_encode(k: Tensor, v: Tensor) -> None:
    check_tensor("k", k, _FLOATS, (*k.shape[:-1], None))
    check_tensor("v", v, k.dtype, (*k.shape[:-1], None), k.device)


def _check_decode(
    k: Tensor, v: Tensor, scales: Tensor | None, k_out: Tensor, v_out: Tensor
) -> None:
    if scales is None:
        raise KernelError("scales: got None, expected the scales of float8_e4m3fn keys and values")
    vectors, device = k.shape[:-1], k.device
    check_tensor("k", k, torch.float8_e4m3fn, (*vectors, None))
    check_tensor("v", v, torch.float8_e4m3fn, (*vectors, None), device)
    check_tensor("scales", scales, torch.uint8, (*vectors, 2), device)
    check_tensor("out.k", k_out, _FLOATS, k.shape)
    check_tensor("out.v", v_out, _FLOATS, v.shape, k_out.device)
