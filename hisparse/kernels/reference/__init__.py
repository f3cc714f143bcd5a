"""Every operation in plain PyTorch: the oracle that the other implementations equal bitwise."""

from hisparse.kernels.reference.attention import paged_attention
from hisparse.kernels.reference.chunk_attention import chunk_attention
from hisparse.kernels.reference.diff_tables import diff_tables
from hisparse.kernels.reference.graph_score import graph_score
from hisparse.kernels.reference.index_score import index_score, store_index_keys
from hisparse.kernels.reference.key_score import key_score
from hisparse.kernels.reference.latents import decode_latents, encode_latents
from hisparse.kernels.reference.lru import lru_diff, promote_tail, rebalance, reset_rows
from hisparse.kernels.reference.outline import outline_score
from hisparse.kernels.reference.page_table import page_table
from hisparse.kernels.reference.quantize import dequantize, quantize
from hisparse.kernels.reference.replay import replay, stack_depths
from hisparse.kernels.reference.select import page_score, select
from hisparse.kernels.reference.sketch import page_sketch, sketch_score
from hisparse.kernels.reference.summary import page_summary
from hisparse.kernels.reference.transfer import (
    append_tokens,
    gather_pages,
    gather_tokens,
    scatter_tokens,
)

__all__ = [
    "append_tokens",
    "chunk_attention",
    "decode_latents",
    "dequantize",
    "diff_tables",
    "encode_latents",
    "gather_pages",
    "gather_tokens",
    "graph_score",
    "index_score",
    "key_score",
    "lru_diff",
    "outline_score",
    "page_score",
    "page_sketch",
    "page_summary",
    "page_table",
    "paged_attention",
    "promote_tail",
    "quantize",
    "rebalance",
    "replay",
    "reset_rows",
    "scatter_tokens",
    "select",
    "sketch_score",
    "stack_depths",
    "store_index_keys",
]
