"""The operations on pages: checked wrappers with several implementations each.

``drop_pages``, ``page_outline``, ``chunk_index_score`` and ``cap_logits`` have
no implementations to choose from: they are PyTorch's operations.
"""

from hisparse.kernels.attention import paged_attention
from hisparse.kernels.chunk_attention import chunk_attention
from hisparse.kernels.diff_tables import diff_tables
from hisparse.kernels.graph_score import GraphSearch, KeyGraphs, graph_score
from hisparse.kernels.index_score import index_score, store_index_keys
from hisparse.kernels.key_score import key_score
from hisparse.kernels.latent_row import LatentRow
from hisparse.kernels.latents import decode_latents, encode_latents
from hisparse.kernels.lru_diff import lru_diff
from hisparse.kernels.outline import outline_bytes, outline_score
from hisparse.kernels.page_summary import page_summary
from hisparse.kernels.page_table import page_table
from hisparse.kernels.quantize import QUANTIZED, dequantize, quantize
from hisparse.kernels.rebalance import drop_pages, promote_tail, rebalance, reset_rows
from hisparse.kernels.recorded import POLICIES, Selections
from hisparse.kernels.reference.index_score import chunk_index_score
from hisparse.kernels.reference.logits import cap_logits
from hisparse.kernels.reference.outline import page_outline
from hisparse.kernels.replay import replay, stack_depths
from hisparse.kernels.row_state import DecodeRows, DiffTables, LruDiff, RowState
from hisparse.kernels.select import SelectRule, page_score, select
from hisparse.kernels.sketch import SketchLayout, TailPages, page_sketch, sketch_score
from hisparse.kernels.threads import serial_operators
from hisparse.kernels.transfer import append_tokens, gather_pages, gather_tokens, scatter_tokens
from hisparse.kernels.verify import verify_capacity, verify_diff, verify_indices

__all__ = [
    "POLICIES",
    "QUANTIZED",
    "DecodeRows",
    "DiffTables",
    "GraphSearch",
    "KeyGraphs",
    "LatentRow",
    "LruDiff",
    "RowState",
    "SelectRule",
    "Selections",
    "SketchLayout",
    "TailPages",
    "append_tokens",
    "cap_logits",
    "chunk_attention",
    "chunk_index_score",
    "decode_latents",
    "dequantize",
    "diff_tables",
    "drop_pages",
    "encode_latents",
    "gather_pages",
    "gather_tokens",
    "graph_score",
    "index_score",
    "key_score",
    "lru_diff",
    "outline_bytes",
    "outline_score",
    "page_outline",
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
    "serial_operators",
    "sketch_score",
    "stack_depths",
    "store_index_keys",
    "verify_capacity",
    "verify_diff",
    "verify_indices",
]
