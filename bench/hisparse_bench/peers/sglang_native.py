"""SGLang's ``torch_native`` decode attention, called as its backend calls it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hisparse.types import PagedKV


def torch_native_decode(
    kv: PagedKV, seq_lens: Tensor, scale: float
) -> Callable[[Tensor], Tensor] | None:
    """A function ``q [B, Hq, D] -> [B, Hq, D]``; None if SGLang is not installed.

    Args:
        kv: ``[B, Hkv, S, D]``, S the longest context.
        seq_lens: ``[B] int64``, tokens of each context.
        scale: softmax scale.
    """
    try:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    except ImportError:
        return None
    # The method uses only its arguments, so the backend needs no server.
    backend = object.__new__(TorchNativeAttnBackend)
    batch, kv_heads, longest, _ = kv.k.shape
    keys, values = (x.transpose(1, 2).flatten(0, 1) for x in kv)
    req_to_token = torch.arange(batch * longest).view(batch, longest)
    requests = torch.arange(batch)

    def decode(q: Tensor) -> Tensor:
        out = torch.empty_like(q)
        backend._run_sdpa_forward_decode(
            q,
            out,
            keys,
            values,
            req_to_token,
            requests,
            seq_lens,
            scaling=scale,
            enable_gqa=q.shape[1] != kv_heads,
        )
        return out

    return decode
