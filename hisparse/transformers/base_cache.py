"""Base class of the cache: rejects beam search, assisted generation and repeated rows."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor
from transformers import Cache

from hisparse.errors import HiSparseError


class BaseCache(Cache):  # type: ignore[misc]
    """A transformers cache without layers that supports greedy decoding and sampling only."""

    _max_length: int

    def __init__(self) -> None:
        super().__init__(layers=[])

    @property
    def is_croppable(self) -> bool:
        """False, which turns assisted generation off."""
        return False

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Maximum number of columns, ``max_length``."""
        return self._max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of columns after a forward of ``query_length`` columns, and the first index."""
        return self.get_seq_length() + query_length, 0

    def __exit__(self, *_: object) -> None:
        self.reset()

    def activate_past_recording(self) -> NoReturn:
        """Rejected: assisted generation."""
        raise HiSparseError(
            "generate: got assisted generation, which verifies several tokens in one dense "
            "forward; expected generate without an assistant"
        )

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        """Rejected: beam search."""
        raise HiSparseError(
            f"beam search: got {beam_idx.numel()} beams, expected num_beams=1 (greedy or sampling)"
        )

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Rejected: ``fork`` repeats rows without copying full pages."""
        raise HiSparseError(
            f"cache: got batch_repeat_interleave({repeats}), expected cache.fork({repeats})"
        )
