"""Keys and values as integers from -127 to 127."""

from __future__ import annotations

import torch

from hisparse.cache.formats.scaled import ScaledFormat
from hisparse.config import KV_FORMATS

__all__ = ["Int8"]


@KV_FORMATS.register("int8")
class Int8(ScaledFormat):
    """The same step for all numbers of a vector: half of it is 1/128 of the largest, or less."""

    dtype = torch.int8
