"""Keys and values in e4m3."""

import torch

from hisparse.cache.formats.base import ScaledFormat
from hisparse.config import KV_FORMATS


@KV_FORMATS.register("fp8_e4m3")
class FP8(ScaledFormat):
    """Three bits of fraction, whatever the size of a number in its vector."""

    dtype = torch.float8_e4m3fn
    sglang_dtype = torch.float8_e4m3fn
