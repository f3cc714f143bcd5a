"""Names only."""

from enum import Enum
from typing import NoReturn


class ImageReadMode(Enum):
    UNCHANGED = 0
    RGB = 3


def _missing(*args: object, **kwargs: object) -> NoReturn:
    raise ImportError("torchvision is a stand-in on this CPU-only set-up; it has no image codecs")


decode_image = decode_jpeg = _missing
