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

__all__ = ["compute_capability_major", "import_function", "to_attended", "token_major"]


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
