"""Operations on the CPU that are not in a folder of their own yet."""

from hisparse.kernels.cpu.attention import chunk_attention, paged_attention
from hisparse.kernels.cpu.quantize import quantize
from hisparse.kernels.cpu.latents import decode_latents, encode_latents
from hisparse.kernels.reference.quantize import dequantize

__all__ = [
    "chunk_attention",
    "decode_latents",
    "quantize",
    "encode_latents",
    "paged_attention",
]
