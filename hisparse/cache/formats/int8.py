"""Keys and values as integers from -127 to 127."""

import torch

from hisparse.cache.formats.base import ScaledFormat
from hisparse.config import KV_FORMATS


@KV_FORMATS.register("int8")
class Int8(ScaledFormat):
    """The same step for all numbers of a vector: errors are at most 1/127 of the largest."""

    dtype = torch.int8
