"""Operations on CUDA devices: bookkeeping and transfers in CUDA C++, the others in Triton.

``__getattr__`` finds the Triton operations and imports them when the first is asked for: a machine
that only moves pages needs no Triton.
"""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType
from typing import Any

from hisparse.kernels.cuda.lru import (
    diff_tables,
    lru_diff,
    page_table,
    promote_tail,
    rebalance,
    reset_rows,
)
from hisparse.kernels.cuda.transfer import (
    append_tokens,
    gather_pages,
    gather_tokens,
    scatter_tokens,
)
from hisparse.kernels.reference.chunk_attention import chunk_attention
from hisparse.kernels.reference.fp8 import decode_fp8

logger = logging.getLogger(__name__)

__all__ = [
    "append_tokens",
    "chunk_attention",
    "decode_fp8",
    "diff_tables",
    "gather_pages",
    "gather_tokens",
    "lru_diff",
    "page_table",
    "promote_tail",
    "rebalance",
    "reset_rows",
    "scatter_tokens",
]

#: Operations of ``hisparse.kernels.triton``.
IN_TRITON = (
    "encode_fp8",
    "outline_score",
    "page_score",
    "page_sketch",
    "page_summary",
    "paged_attention",
    "select",
    "sketch_score",
)


def __getattr__(name: str) -> Any:
    if name not in IN_TRITON:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_triton(), name)


@functools.cache
def _triton() -> ModuleType:
    """The Triton operations, or, after a warning, PyTorch's if Triton cannot be imported."""
    try:
        return importlib.import_module("hisparse.kernels.triton")
    except ImportError as error:
        logger.warning("Triton kernels are off, PyTorch's operators do their work: %s", error)
        return importlib.import_module("hisparse.kernels.reference")
