"""Representations of pages that were loaded from a store: rebuilt in the next forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from hisparse.cache import SparseKVCacheManager
from hisparse.engine.step import PrefillChunk

__all__ = ["Build", "LoadedPages"]

#: ``(layer_id, chunk, k, v)``, K and V ``[T, Hkv, D]``: builds the representations of a chunk.
Build = Callable[[int, PrefillChunk, Tensor, Tensor], None]


class LoadedPages:
    """Host pages that have K and V, but no representations yet.

    The prefill that follows a load builds them from K and V, each layer's before it attends.

    Args:
        manager: reads K and V.
        build: builds the representations of a chunk, which has no queries; None: pages come with
            all that they need.
        num_pages: pages of the host pool.
        page_size: S, tokens.
    """

    def __init__(
        self, manager: SparseKVCacheManager, build: Build | None, num_pages: int, page_size: int
    ) -> None:
        self._manager = manager
        self._build = build
        self._size = page_size
        self._pending = np.zeros(num_pages, dtype=np.bool_)
        self._has_pending = False
        self._chunks: list[PrefillChunk] = []

    def add(self, pages: Tensor) -> int:
        """Note that ``pages [P] int64`` were loaded; returns how many of them are built."""
        if self._build is None or not len(pages):
            return 0
        self._pending[pages.numpy()] = True
        self._has_pending = True
        return len(pages)

    def drop(self, pages: Tensor) -> None:
        """Forget pages whose request will not run."""
        self._pending[pages.numpy()] = False

    def begin(self, chunks: Sequence[PrefillChunk]) -> None:
        """Find the loaded pages among the prefixes of a prefill's chunks."""
        self._chunks = []
        if not self._has_pending:
            return
        for chunk in chunks:
            pages = chunk.host_pages_cpu[: chunk.start // self._size].numpy()
            found = np.flatnonzero(self._pending[pages])
            # Another chunk of this forward may have the same prefix.
            self._pending[pages] = False
            self._chunks += self._runs(chunk, found)
        self._has_pending = bool(self._pending.any())

    def _runs(self, chunk: PrefillChunk, found: np.ndarray) -> list[PrefillChunk]:
        """Consecutive pages as chunks, each at most a staging tile.

        Args:
            chunk: the chunk with these pages before it.
            found: ``[n]``, ascending indices of pages in the sequence.
        """
        width, runs = self._manager.staging_pages, []
        for _, group in groupby(enumerate(found.tolist()), lambda pair: pair[1] - pair[0]):
            indices = [index for _, index in group]
            for first in range(0, len(indices), width):
                part = indices[first : first + width]
                runs.append(
                    PrefillChunk(
                        slot=chunk.slot,
                        start=part[0] * self._size,
                        length=len(part) * self._size,
                        offset=0,
                        host_pages=chunk.host_pages[: part[-1] + 1],
                        is_last=False,
                    )
                )
        return runs

    def prepare(self, layer_id: int) -> None:
        """Build the representations of this forward's loaded pages in one layer."""
        if self._build is None:
            return
        for chunk in self._chunks:
            pages = chunk.host_pages_cpu[chunk.start // self._size :].long()
            slots = (pages[:, None] * self._size + torch.arange(self._size)).flatten()
            self._build(layer_id, chunk, *self._manager.kv_io.read_tokens(layer_id, slots))
