"""Operations on the CPU that are not in a folder of their own yet."""

from hisparse.kernels.cpu.attention import chunk_attention, paged_attention
from hisparse.kernels.cpu.fp8 import encode_fp8
from hisparse.kernels.cpu.latents import decode_latents, encode_latents
from hisparse.kernels.reference.fp8 import decode_fp8

__all__ = [
    "chunk_attention",
    "decode_fp8",
    "decode_latents",
    "encode_fp8",
    "encode_latents",
    "paged_attention",
]
