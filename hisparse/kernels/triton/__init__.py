"""The arithmetic operations in Triton; bookkeeping and transfers are CUDA C++."""

from hisparse.kernels.triton.attention import paged_attention
from hisparse.kernels.triton.chunk_attention import chunk_attention
from hisparse.kernels.triton.index_score import index_score, store_index_keys
from hisparse.kernels.triton.latents import decode_latents, encode_latents
from hisparse.kernels.triton.outline import outline_score
from hisparse.kernels.triton.page_score import page_score
from hisparse.kernels.triton.page_summary import page_summary
from hisparse.kernels.triton.quantize import quantize
from hisparse.kernels.triton.select import select
from hisparse.kernels.triton.sketch import page_sketch
from hisparse.kernels.triton.sketch_score import sketch_score

__all__ = [
    "chunk_attention",
    "decode_latents",
    "encode_latents",
    "index_score",
    "outline_score",
    "page_score",
    "page_sketch",
    "page_summary",
    "paged_attention",
    "quantize",
    "select",
    "sketch_score",
    "store_index_keys",
]
