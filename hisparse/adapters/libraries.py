"""Helpers for adapters to attention libraries: import, layout and results."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hisparse.adapters.base import Attended
from hisparse.types import AttentionRule


def token_major(pages: Tensor) -> Tensor:
    """View pages ``[N, Hr, S, D]`` as ``[N, S, Hr, D]``.

    The result is contiguous, because device pages and staging tiles are stored in this order.
    FlashAttention takes it, and FlashInfer calls it NHD.
    """
    return pages.transpose(1, 2)


def to_attended(out: Tensor, lse: Tensor, seq_lens: Tensor, *, base_2: bool = False) -> Attended:
    """Convert a library's results to float32 with a natural lse.

    Rows without tokens, such as the padding of a CUDA graph, get output 0 and lse -inf: libraries
    return inf or -inf for them, or do not write them.

    Args:
        out: ``[R, Q, Dv]``, any floating dtype.
        lse: ``[R, Q] float32``.
        seq_lens: ``[R] int32``, tokens attended by each row.
        base_2: whether the lse has base 2 instead of e.
    """
    empty = (seq_lens == 0)[:, None]
    lse = lse * math.log(2) if base_2 else lse
    out = out.float().masked_fill_(empty[..., None], 0.0)
    return Attended(out, lse.masked_fill(empty, -math.inf))


def prefill_in_window(
    attend: Callable[[Tensor, int], Attended],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AttentionRule,
    first_key: int,
) -> Attended:
    """:meth:`BackendAdapter.attend_prefill` with a window, by a library that aligns sequence ends.

    Such a library takes the last key as the last query's own, and hides keys that are more than
    ``left`` before a query's own. It gets only the queries that attend any key.

    Args:
        attend: the library: queries ``[n, Hq, D]`` and ``left``, -1 without a window, to results.
        q, k, v, rule, first_key: as for ``attend_prefill``.
    """
    if not rule.window:
        return attend(q, -1)
    # The window of a later query begins after the last key.
    count = min(max(first_key + len(k) + rule.window - 1, 0), len(q))
    left = len(k) - count + rule.window - 1 + first_key
    if count == len(q) > 0:
        return attend(q, left)
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = q.new_full(q.shape[:2], -math.inf, dtype=torch.float32)
    if count:
        out[:count], lse[:count] = attend(q[:count], left)
    return Attended(out, lse)


@functools.cache
def compute_capability_major() -> int:
    """Major compute capability of the GPU; 9 (sm_90) on machines without a GPU."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 9


def import_function(name: str, *modules: str) -> Callable[..., Any] | str:
    """Import a function from the first module that has it.

    Args:
        name: name of the function.
        modules: modules to try, in order.

    Returns:
        The function, or the reasons why no module has it.
    """
    reasons = []
    for module in modules:
        try:
            function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, OSError, RuntimeError) as error:
            reasons.append(str(error).splitlines()[0] if str(error) else module)
        else:
            return function
    return "; ".join(reasons)
