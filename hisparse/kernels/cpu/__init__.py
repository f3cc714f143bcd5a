"""Every operation on the CPU, mostly in C++; bitwise ``reference`` where nothing is rounded."""

from hisparse.kernels.cpu.attention import chunk_attention, paged_attention
from hisparse.kernels.cpu.graph_score import graph_score
from hisparse.kernels.cpu.key_score import key_score
from hisparse.kernels.cpu.latents import decode_latents, encode_latents
from hisparse.kernels.cpu.lru import diff_tables, lru_diff, page_table, promote_tail, rebalance
from hisparse.kernels.cpu.outline import outline_score
from hisparse.kernels.cpu.quantize import quantize
from hisparse.kernels.cpu.replay import replay, stack_depths
from hisparse.kernels.cpu.select import page_score, page_summary, select
from hisparse.kernels.cpu.sketch import page_sketch, sketch_score
from hisparse.kernels.cpu.transfer import (
    append_tokens,
    gather_pages,
    gather_tokens,
    scatter_tokens,
)
from hisparse.kernels.reference.index_score import index_score, store_index_keys
from hisparse.kernels.reference.lru import reset_rows
from hisparse.kernels.reference.quantize import dequantize

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
