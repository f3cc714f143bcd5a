"""Operations on CUDA devices: bookkeeping, transfers and selections in CUDA C++, others in Triton.

``__getattr__`` finds the Triton operations and imports them when the first is asked for: a machine
that only moves pages needs no Triton.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hisparse.kernels.cuda.flash import flash_attention, takes_flash
from hisparse.kernels.cuda.from_triton import triton_ops
from hisparse.kernels.cuda.lru import (
    diff_tables,
    lru_diff,
    page_table,
    promote_tail,
    rebalance,
    reset_rows,
)
from hisparse.kernels.cuda.select import select
from hisparse.kernels.cuda.transfer import (
    append_tokens,
    gather_pages,
    gather_tokens,
    scatter_tokens,
)
from hisparse.kernels.reference.quantize import dequantize
from hisparse.types import UNSCALED, AttentionRule

__all__ = [
    "append_tokens",
    "chunk_attention",
    "dequantize",
    "diff_tables",
    "gather_pages",
    "gather_tokens",
    "lru_diff",
    "page_table",
    "promote_tail",
    "rebalance",
    "reset_rows",
    "scatter_tokens",
    "select",
]

#: Operations of ``hisparse.kernels.triton``.
IN_TRITON = (
    "decode_latents",
    "quantize",
    "encode_latents",
    "index_score",
    "outline_score",
    "page_score",
    "page_sketch",
    "page_summary",
    "paged_attention",
    "sketch_score",
    "store_index_keys",
)


def chunk_attention(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    rule: AttentionRule = UNSCALED,
    first_key: int = 0,
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.chunk_attention`: PyTorch's flash attention, or Triton's.

    PyTorch's serves MHA and GQA in 16 bits, without a cap or a window. Triton's serves everything
    else, above all MLA.
    """
    if not (rule.logit_cap or rule.window) and takes_flash(query, k, v):
        return flash_attention(query, k, v, causal, rule.scale)
    out, lse = triton_ops().chunk_attention(query, k, v, causal, rule, first_key)
    return out, lse


def __getattr__(name: str) -> Any:
    if name not in IN_TRITON:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(triton_ops(), name)
