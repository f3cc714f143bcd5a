"""Operations in plain PyTorch that are not in a folder of their own yet."""

from hisparse.kernels.reference.attention import paged_attention
from hisparse.kernels.reference.chunk_attention import chunk_attention
from hisparse.kernels.reference.fp8 import decode_fp8, encode_fp8
from hisparse.kernels.reference.latents import decode_latents, encode_latents

__all__ = [
    "chunk_attention",
    "decode_fp8",
    "decode_latents",
    "encode_fp8",
    "encode_latents",
    "paged_attention",
]
