"""Checks tensors, masks and token ids before the engine uses them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hisparse.algorithms import SelectionPolicy
from hisparse.errors import ConfigError, HiSparseError, quoted, shorten
from hisparse.types import AttentionRule


def check_layer(
    layer_id: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AttentionRule,
    policy: SelectionPolicy,
    device: torch.device,
    max_length: int,
) -> None:
    """Check that a layer's tensors and rule are those that the cache was built for.

    Args:
        layer_id: layer number.
        q: ``[B, Hq, T, D]``.
        k, v: ``[B, Hkv, T, D]``.
        rule: how the layer attends.
        policy: shapes and rules that the cache was built for.
        device: device of the cache's tensors.
        max_length: columns of the cache; a window that holds them is none.

    Raises:
        HiSparseError: a shape, a dtype, the device or the rule differs.
    """
    kv = policy.kv
    if layer_id >= kv.num_layers:
        raise HiSparseError(f"got layer {layer_id}, expected 0 to {kv.num_layers - 1}")
    known = policy.rules[layer_id]
    expected = {
        "heads and width of q": (tuple(q.shape[1::2]), (kv.num_q_heads, kv.head_dim)),
        "heads and width of k": (tuple(k.shape[1::2]), (kv.num_kv_heads, kv.head_dim)),
        "heads and width of v": (tuple(v.shape[1::2]), (kv.num_kv_heads, kv.v_head_dim)),
        "dtype of k": (k.dtype, kv.dtype),
        "dtype of v": (v.dtype, kv.dtype),
        "device type": (q.device.type, device.type),
        "softmax scale": (rule.scale, known.scale),
        "cap of logits": (rule.logit_cap, known.logit_cap),
        "window": (rule.window if rule.window < max_length else 0, known.window),
    }
    for what, (got, want) in expected.items():
        if got != want:
            raise HiSparseError(
                f"layer {layer_id}: got {what} {got}, expected {want}; make the cache from this "
                "model"
            )


def read_mask(mask: Tensor | None, cached: np.ndarray, width: int) -> np.ndarray:
    """Find out which new columns hold tokens and which hold padding.

    Args:
        mask: ``[B, columns + T]``, non-zero at tokens; None if every column holds a token.
        cached: ``[B, columns] bool``, True at tokens, for the columns in the cache.
        width: T, new columns.

    Returns:
        ``[B, T] bool``, True at tokens.

    Raises:
        HiSparseError: the mask has another shape, or differs from ``cached``.
    """
    batch, columns = cached.shape
    if mask is None:
        return np.ones((batch, width), dtype=np.bool_)
    if tuple(mask.shape) != (batch, columns + width):
        raise HiSparseError(
            f"attention_mask: got shape {list(mask.shape)}, expected {[batch, columns + width]}: "
            f"{columns} cached columns and {width} new ones, True at tokens"
        )
    is_token: np.ndarray = mask.to(device="cpu", dtype=torch.bool).numpy()
    changed = (is_token[:, :columns] != cached).any(1)
    if changed.any():
        row = int(changed.argmax())
        raise HiSparseError(
            f"attention_mask: row {row} has {int(is_token[row, :columns].sum())} tokens in the "
            f"{columns} cached columns, expected the same {int(cached[row].sum())} as before"
        )
    return is_token[:, columns:]


def read_token_ids(token_ids: Tensor | Sequence[int]) -> np.ndarray:
    """The tokens of one context.

    Args:
        token_ids: ``[n]``, a tensor of integers or a list.

    Returns:
        ``[n] int64``.

    Raises:
        ConfigError: they are no vector of token ids, or there is none.
    """
    try:
        ids = torch.as_tensor(token_ids)
    except (TypeError, ValueError, RuntimeError):
        raise _not_tokens(quoted(token_ids)) from None
    if ids.dim() != 1 or not ids.numel():
        raise _not_tokens(f"shape {shorten(ids.shape)}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise _not_tokens(str(ids.dtype))
    low, high = (int(x) for x in ids.aminmax())
    if low < 0 or high >= 2**32:
        raise _not_tokens(f"numbers of {low} to {high}")
    numbers: np.ndarray = ids.cpu().numpy().astype(np.int64)
    return numbers


def _not_tokens(got: str) -> ConfigError:
    return ConfigError(
        f"token_ids: got {got}, expected a vector of one or more token ids from 0 to 2^32 - 1, "
        "such as ids[0]"
    )
