"""Attention of a chunk by PyTorch's flash attention, which returns the log-sum-exp, or Triton."""

import functools

import torch
from torch import Tensor

from hisparse.kernels.attention.op import CHUNK_ATTENTION
from hisparse.types import AttentionRule

_MAX_WIDTH = 256
#: Elements of 16 bits that it loads at once; widths and strides have to be multiples.
_VECTOR = 8


def chunk_attention(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    rule: AttentionRule,
    first_key: int,
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.chunk_attention`: PyTorch's flash attention, or Triton's.

    PyTorch's serves MHA and GQA in 16 bits, without a cap or a window. Triton's serves everything
    else, above all MLA.
    """
    if not (rule.logit_cap or rule.window) and takes_flash(query, k, v):
        return flash_attention(query, k, v, causal, rule.scale)
    out, lse = CHUNK_ATTENTION.function("triton")(query, k, v, causal, rule, first_key)
    return out, lse


def takes_flash(query: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether PyTorch's flash attention takes these tensors, by dtype, shape, strides and device.

    Args:
        query: ``[T, Hq, Dk]``.
        k: ``[Tk, Hkv, Dk]``.
        v: ``[Tk, Hkv, Dv]``.
    """
    width, dtype = query.shape[-1], query.dtype
    return (
        dtype in (torch.bfloat16, torch.float16)
        and k.dtype == dtype
        and width == v.shape[-1] <= _MAX_WIDTH
        and width % _VECTOR == 0
        # Without keys it gives +inf for the log-sum-exp.
        and 0 not in (query.numel(), k.numel())
        and all(_vectors(x) for x in (query, k, v))
        and _has_flash(query.device)
    )


def flash_attention(
    query: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.chunk_attention`. Heads of a group share keys without a copy."""
    # [T, H, D] -> [1, H, T, D]
    tensors = (x.transpose(0, 1).unsqueeze(0) for x in (query, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        *tensors, 0.0, causal, False, scale=scale
    )
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0).transpose(0, 1)


def _vectors(x: Tensor) -> bool:
    """Whether all heads of all tokens begin at a multiple of a vector's bytes."""
    strides = x.stride()
    return strides[-1] == 1 and all(
        stride % _VECTOR == 0 for stride in (*strides[:-1], x.storage_offset())
    )


@functools.cache
def _has_flash(device: torch.device) -> bool:
    """Whether this PyTorch was built with it and this GPU runs it."""
    built = torch.backends.cuda.is_flash_attention_available()
    return built and torch.cuda.get_device_capability(device) >= (8, 0)
