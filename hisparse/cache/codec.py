"""How keys and values are stored: as the model computes them, or in eight bits with scales."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels import decode_fp8, encode_fp8
from hisparse.types import KVSpec, PagedKV, StoredKV

__all__ = ["as_read", "decode", "encode", "split_layers"]


def split_layers(k: Tensor, v: Tensor, scales: Tensor | None) -> list[StoredKV]:
    """Pools of all layers ``[L, ...]``, layer by layer."""
    if scales is None:
        return [StoredKV(*each) for each in zip(k, v, strict=True)]
    return [StoredKV(*each) for each in zip(k, v, scales, strict=True)]


def encode(kv: KVSpec, k: Tensor, v: Tensor) -> StoredKV:
    """Keys and values ``[..., D]`` in the model's dtype, as the pools store them."""
    return encode_fp8(k, v) if kv.fp8 else StoredKV(k, v)


def decode(kv: KVSpec, stored: StoredKV, out: PagedKV | None = None) -> PagedKV:
    """What :func:`encode` stored, in the model's dtype.

    Args:
        kv: the model.
        stored: ``[..., D]``.
        out: ``[..., D]``, written to if the pools store another dtype than the model's. None:
            allocated.
    """
    if stored.scales is None:
        return stored.kv
    if out is None:
        k, v = (torch.empty(x.shape, dtype=kv.dtype, device=x.device) for x in stored.kv)
        out = PagedKV(k, v)
    decode_fp8(stored, out)
    return out


def as_read(kv: KVSpec, k: Tensor, v: Tensor) -> PagedKV:
    """Keys and values ``[..., D]``, rounded to the values that a later read returns."""
    return decode(kv, encode(kv, k, v))
