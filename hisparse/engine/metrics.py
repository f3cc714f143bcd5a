"""Statistics of the cache since the start, as users see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """Totals since the start; pages and selections are counted over layers and rows.

    Attributes:
        hit_pages: selected pages that were resident, in decode steps.
        miss_pages: selected pages that were loaded, in decode steps.
        selected_tokens: tokens that decode steps attended.
        selections: selections that the algorithm made.
        prefetched_pages: pages that were loaded before a query selected them.
        capped_selections: selections of varying length that filled ``device_buffer_size`` and left
            pages out.
        invalid_scores: selections for which the algorithm scored a page with NaN or +inf.
        malformed_selections: selections with a duplicate page, a gap, a page that the request does
            not have, or another length than stated; summed over the layers that attend them.
        decode_read_bytes: bytes from host to device during decode steps.
        prefill_read_bytes: bytes from host to device during prefill.
        written_bytes: bytes from device to host.
        extensions: totals of the extensions' own counters, by name.
        layers: ``hit_pages`` and ``miss_pages`` of each layer; empty without ``layer_metrics``.
    """

    hit_pages: int
    miss_pages: int
    selected_tokens: int
    selections: int
    prefetched_pages: int
    capped_selections: int
    invalid_scores: int
    malformed_selections: int
    decode_read_bytes: int
    prefill_read_bytes: int
    written_bytes: int
    extensions: Mapping[str, int] = field(default_factory=dict)
    layers: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(
        cls,
        totals: Mapping[str, int],
        *,
        page_tokens: int,
        page_bytes: int,
        extensions: Mapping[str, str],
        layers: tuple[tuple[int, int], ...] = (),
    ) -> CacheStats:
        """Stats from the totals of :class:`hisparse.cache.Counters`.

        Args:
            totals: by name.
            page_tokens: S.
            page_bytes: bytes of one device page.
            extensions: counters of the extensions, name to description.
            layers: hits and misses of each layer.
        """
        hits, misses, prefetched = (
            totals.get(name, 0) for name in ("hit_pages", "miss_pages", "prefetched_pages")
        )
        read = (misses + prefetched) * page_bytes + totals.get("streamed_decode_bytes", 0)
        return cls(
            hit_pages=hits,
            miss_pages=misses,
            selected_tokens=(hits + misses) * page_tokens + totals.get("other_tokens", 0),
            selections=totals.get("selections", 0),
            prefetched_pages=prefetched,
            capped_selections=totals.get("capped_selections", 0),
            invalid_scores=totals.get("invalid_scores", 0),
            malformed_selections=totals.get("malformed_selections", 0),
            decode_read_bytes=read,
            prefill_read_bytes=totals.get("prefill_read_bytes", 0),
            written_bytes=totals.get("written_bytes", 0),
            extensions={name: totals.get(name, 0) for name in extensions},
            layers=layers,
        )

    @property
    def hit_ratio(self) -> float:
        """Hits per selected page; 1.0 before the first selection."""
        selected = self.hit_pages + self.miss_pages
        return self.hit_pages / selected if selected else 1.0
