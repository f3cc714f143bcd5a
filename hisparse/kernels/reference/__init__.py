"""Operations in plain PyTorch that are not in a folder of their own yet."""

from hisparse.kernels.reference.attention import paged_attention
from hisparse.kernels.reference.chunk_attention import chunk_attention
from hisparse.kernels.reference.quantize import dequantize, quantize
from hisparse.kernels.reference.latents import decode_latents, encode_latents

__all__ = [
    "chunk_attention",
    "decode_latents",
    "quantize",
    "encode_latents",
    "paged_attention",
]
