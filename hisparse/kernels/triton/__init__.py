"""Operations in Triton that are not in a folder of their own yet."""

from hisparse.kernels.triton.attention import paged_attention
from hisparse.kernels.triton.chunk_attention import chunk_attention
from hisparse.kernels.triton.quantize import quantize
from hisparse.kernels.triton.latents import decode_latents, encode_latents

__all__ = [
    "chunk_attention",
    "decode_latents",
    "encode_latents",
    "paged_attention",
]
