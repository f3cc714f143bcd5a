"""What the attention libraries' calls have in common."""

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
    """``[N, Hr, S, D]`` -> ``[N, S, Hr, D]``, a view.

    It is how device pages and staging tiles lie in memory: what FlashAttention takes, and what
    FlashInfer calls NHD.
    """
    return pages.transpose(1, 2)


def to_attended(out: Tensor, lse: Tensor, seq_lens: Tensor, *, base_2: bool = False) -> Attended:
    """What a library returned, as this project has it.

    Args:
        out: ``[R, Q, Dv]``, any floating dtype.
        lse: ``[R, Q] float32``.
        seq_lens: ``[R] int32``, tokens attended. Of a row without any, such as the padding of a
            CUDA graph, libraries return an lse of inf or -inf, or leave both as they were.
        base_2: whether the lse is a logarithm to base 2; else natural.
    """
    empty = (seq_lens == 0)[:, None]
    lse = lse * math.log(2) if base_2 else lse
    out = out.float().masked_fill_(empty[..., None], 0.0)
    return Attended(out, lse.masked_fill(empty, -math.inf))


@functools.cache
def compute_capability_major() -> int:
    """The GPU's major compute capability; 9, of sm_90, where there is no GPU to ask."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 9


def import_function(name: str, *modules: str) -> Callable[..., Any] | str:
    """The function ``name`` of the first of ``modules`` that has it, or why none has."""
    reasons = []
    for module in modules:
        try:
            found: Callable[..., Any] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, OSError, RuntimeError) as error:
            reasons.append(str(error).splitlines()[0] if str(error) else module)
        else:
            return found
    return "; ".join(reasons)
