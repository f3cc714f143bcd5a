"""What a forward hands over, checked before it is used."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hisparse.algorithms import SelectionPolicy
from hisparse.errors import HiSparseError

__all__ = ["check_layer", "read_mask"]


def check_layer(
    layer_id: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    policy: SelectionPolicy,
    device: torch.device,
) -> None:
    """That a layer attends in the shapes that the cache was made for.

    Args:
        layer_id: layer number.
        q: ``[B, Hq, T, D]``.
        k, v: ``[B, Hkv, T, D]``.
        scale: softmax scale.
        policy: what the cache was made for.
        device: where the cache's device side lies.

    Raises:
        HiSparseError: it does not.
    """
    kv = policy.kv
    expected = {
        "heads and width of q": (tuple(q.shape[1::2]), (kv.num_q_heads, kv.head_dim)),
        "heads and width of k": (tuple(k.shape[1::2]), (kv.num_kv_heads, kv.head_dim)),
        "heads and width of v": (tuple(v.shape[1::2]), (kv.num_kv_heads, kv.v_head_dim)),
        "dtype of k": (k.dtype, kv.dtype),
        "dtype of v": (v.dtype, kv.dtype),
        "device type": (q.device.type, device.type),
        "softmax scale": (scale, policy.scale),
    }
    for what, (got, want) in expected.items():
        if got != want:
            raise HiSparseError(
                f"layer {layer_id}: got {what} {got}, expected {want}; make the cache from this "
                "very model"
            )
    if layer_id >= kv.num_layers:
        raise HiSparseError(f"got layer {layer_id}, expected 0 to {kv.num_layers - 1}")


def read_mask(mask: Tensor | None, seen: np.ndarray, width: int) -> np.ndarray:
    """Which new columns are tokens.

    Args:
        mask: ``[B, columns + T]``, True or non-zero where there is a token; None: everywhere.
        seen: ``[B, columns] bool``, the same for the columns that the cache has.
        width: T.

    Returns:
        ``[B, T] bool``.

    Raises:
        HiSparseError: another shape, or cached columns that are not what they were.
    """
    batch, columns = seen.shape
    if mask is None:
        return np.ones((batch, width), dtype=np.bool_)
    if tuple(mask.shape) != (batch, columns + width):
        raise HiSparseError(
            f"attention_mask: got shape {list(mask.shape)}, expected {[batch, columns + width]}: "
            f"{columns} cached columns and {width} new ones, True where there is a token"
        )
    real: np.ndarray = mask.to(device="cpu", dtype=torch.bool).numpy()
    changed = (real[:, :columns] != seen).any(1)
    if changed.any():
        row = int(changed.argmax())
        raise HiSparseError(
            f"attention_mask: row {row} has {int(real[row, :columns].sum())} tokens in the "
            f"{columns} cached columns, expected the same {int(seen[row].sum())} as before"
        )
    return real[:, columns:]
