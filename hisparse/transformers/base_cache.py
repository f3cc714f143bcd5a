"""What transformers' caches offer beside greedy decoding and sampling, and hisparse does not."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor
from transformers import Cache

from hisparse.errors import HiSparseError

__all__ = ["BaseCache"]


class BaseCache(Cache):  # type: ignore[misc]
    """A cache without layers of its own that refuses, in one line each, to move its rows."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    @property
    def is_croppable(self) -> bool:
        """False: assisted generation is not served."""
        return False

    def activate_past_recording(self) -> NoReturn:
        """Refused: assisted generation."""
        raise HiSparseError(
            "assisted generation checks several tokens in one forward, which is dense here; "
            "expected generate without an assistant"
        )

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        """Refused: beam search."""
        raise HiSparseError(
            f"beam search reorders rows: got {beam_idx.numel()} beams, expected num_beams=1 "
            "(greedy or sampling)"
        )

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refused: :meth:`fork` does it without a copy."""
        raise HiSparseError(f"batch_repeat_interleave({repeats}): expected cache.fork({repeats})")
