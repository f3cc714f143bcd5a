"""Counts of what the cache did: exact under batching, read out without a sync."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["CacheCounters", "CacheStats"]


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """Totals since the start.

    Attributes:
        hit_pages: pages that a decode step selected and found on the device, over layers and rows.
        miss_pages: pages that a decode step selected and had to bring in.
        selected_tokens: tokens that decode steps attended, over layers and rows.
        selections: what algorithms selected, over layers and rows.
        speculated_selections: selections, one per row and layer that selects, that were made
            ahead by another query.
        corrected_selections: those of them that were not kept, for the query was too different.
        prefetched_pages: pages that selections made ahead brought in, over layers and rows.
        capped_selections: selections of an algorithm that keeps as many pages as a query needs
            that filled ``device_buffer_size`` and left pages out, over layers and rows.
        decode_read_bytes: host to device, during decode steps.
        prefill_read_bytes: host to device, during prefill.
        written_bytes: device to host.
    """

    hit_pages: int
    miss_pages: int
    selected_tokens: int
    selections: int
    speculated_selections: int
    corrected_selections: int
    prefetched_pages: int
    capped_selections: int
    decode_read_bytes: int
    prefill_read_bytes: int
    written_bytes: int

    @property
    def hit_ratio(self) -> float:
        """Hits among the selected pages; 1.0 before anything was selected."""
        selected = self.hit_pages + self.miss_pages
        return self.hit_pages / selected if selected else 1.0


class CacheCounters:
    """Hits and misses are counted on the device, bytes that the host decides on the host.

    Args:
        page_tokens: S.
        page_bytes: bytes of one device page.
        device: where hits and misses are counted.
    """

    def __init__(self, page_tokens: int, page_bytes: int, device: torch.device) -> None:
        self._page_tokens = page_tokens
        self._page_bytes = page_bytes
        # Hits, misses, capped, speculated and corrected selections, prefetched pages.
        self._totals = torch.zeros(6, dtype=torch.int64, device=device)
        self._seen = torch.zeros(6, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._counted: tuple[list[Tensor], ...] = tuple([] for _ in range(6))
        self._selections = 0
        self._other_tokens = 0
        self._dense_read_bytes = 0
        self._prefill_read_bytes = 0
        self._written_bytes = 0

    def count_selection(self, num_hits: Tensor, num_misses: Tensor) -> None:
        """``[R] int32`` each, of one layer of a decode step; summed up in :meth:`publish`."""
        self._counted[0].append(num_hits)
        self._counted[1].append(num_misses)

    def count_capped(self, capped: Tensor) -> None:
        """``[R] bool``, which selections of one layer were cut short; summed up likewise."""
        self._counted[2].append(capped)

    def count_speculated(self, known: Tensor, corrected: Tensor) -> None:
        """``[B, H] bool`` of one layer: whose selection was made ahead, and who did not keep it."""
        self._counted[3].append(known.flatten())
        self._counted[4].append(corrected.flatten())

    def count_prefetched(self, num_pages: Tensor) -> None:
        """``[R] int32``, pages that were brought in ahead in one layer; summed up likewise."""
        self._counted[5].append(num_pages)

    def count_chosen(self, num_selections: int) -> None:
        """Selections of a decode step, over layers and rows."""
        self._selections += num_selections

    def count_placed(self, num_pages: int) -> None:
        """Pages that prefill read from host memory into device pages."""
        self._prefill_read_bytes += num_pages * self._page_bytes

    def count_tokens(self, num_tokens: int) -> None:
        """Tokens that a decode step attends beside selected pages, over layers and rows."""
        self._other_tokens += num_tokens

    def count_staged(self, num_bytes: int, *, decode: bool) -> None:
        """Bytes that were read from host memory through staging."""
        if decode:
            self._dense_read_bytes += num_bytes
        else:
            self._prefill_read_bytes += num_bytes

    def count_written(self, num_bytes: int) -> None:
        """Bytes that went to host memory."""
        self._written_bytes += num_bytes

    def publish(self) -> None:
        """Start to copy the device's counts to the host, on the current stream, without waiting."""
        for total, counts in zip(self._totals, self._counted, strict=True):
            if counts:
                total.add_(torch.cat(counts).sum())
                counts.clear()
        self._seen.copy_(self._totals, non_blocking=True)

    def stats(self) -> CacheStats:
        """Totals as of the last :meth:`publish` that the device has finished."""
        hits, misses, capped, speculated, corrected, prefetched = self._seen.tolist()
        return CacheStats(
            hit_pages=hits,
            miss_pages=misses,
            selected_tokens=(hits + misses) * self._page_tokens + self._other_tokens,
            selections=self._selections,
            speculated_selections=speculated,
            corrected_selections=corrected,
            prefetched_pages=prefetched,
            capped_selections=capped,
            decode_read_bytes=(misses + prefetched) * self._page_bytes + self._dense_read_bytes,
            prefill_read_bytes=self._prefill_read_bytes,
            written_bytes=self._written_bytes,
        )
