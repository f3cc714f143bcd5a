"""Every operation on CUDA devices: bookkeeping and transfers in CUDA C++, the rest in Triton.

Triton's operations are imported when one is first asked for: the others need no Triton.
"""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hisparse.kernels.cuda.lru import (
    lru_diff,
    page_table,
    page_tables,
    promote_tail,
    rebalance,
    reset_rows,
)
from hisparse.kernels.cuda.transfer import gather_pages, gather_tokens, scatter_tokens
from hisparse.kernels.reference.fp8 import decode_fp8

if TYPE_CHECKING:
    from hisparse.kernels.reference import (
        encode_fp8,
        page_score,
        page_sketch,
        page_summary,
        paged_attention,
        select,
        sketch_score,
    )

logger = logging.getLogger(__name__)

__all__ = [
    "decode_fp8",
    "encode_fp8",
    "gather_pages",
    "gather_tokens",
    "lru_diff",
    "page_score",
    "page_sketch",
    "page_summary",
    "page_table",
    "page_tables",
    "paged_attention",
    "promote_tail",
    "rebalance",
    "reset_rows",
    "scatter_tokens",
    "select",
    "sketch_score",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_arithmetic(), name)


@functools.cache
def _arithmetic() -> ModuleType:
    """Triton's operations; without Triton, said once, PyTorch's operators do their work."""
    try:
        return importlib.import_module("hisparse.kernels.triton")
    except ImportError as error:
        logger.warning("Triton kernels are off, PyTorch's operators do their work: %s", error)
        return importlib.import_module("hisparse.kernels.reference")
