"""Names only."""

from enum import Enum
from typing import NoReturn


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def pil_to_tensor(*args: object, **kwargs: object) -> NoReturn:
    raise ImportError("torchvision is a stand-in on this CPU-only set-up; it has no transforms")
