"""Totals since the start: exact under batching; reading them does not wait for the device."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

#: Counters that every engine sums on the device. The first three are those of
#: :attr:`hisparse.kernels.DecodeRows.counts`.
_ON_DEVICE = (
    "hit_pages",
    "miss_pages",
    "malformed_selections",
    "capped_selections",
    "invalid_scores",
    "away_pages",
)


#: Fields of :class:`CacheStats`. Pages and selections are counted over layers and rows.
COUNTERS = {
    "hit_pages": "Pages that decode steps selected and found on the device",
    "miss_pages": "Pages that decode steps selected and read from host memory",
    "away_pages": "Of the missing pages, those that the CPU attended in host memory",
    "selected_tokens": "Tokens that decode steps attended, summed over layers and rows",
    "selections": "Selections that the algorithm made, summed over layers and rows",
    "capped_selections": "Selections of variable length that reached device_buffer_size",
    "invalid_scores": "Selections for which the algorithm scored a page with NaN or +inf",
    "malformed_selections": "Selections with a duplicate page, a gap, or a page that is not there",
    "decode_read_bytes": "Bytes that decode steps read from host memory",
    "prefill_read_bytes": "Bytes that prefill read from host memory",
    "written_bytes": "Bytes written to host memory",
}
#: What is decided for a request, each counted once a request: values of the label ``choice`` of
#: ``hisparse:requests_total``, which :data:`REQUESTS` describes.
CHOICES = ("resident", "streamed", "sparse", "reused")
REQUESTS = "Requests by what was decided for them, each choice once a request"


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """Totals since the start: those of :data:`COUNTERS`, and two more.

    Attributes:
        extensions: totals of the extensions' own counters, by name.
        choices: requests by :data:`CHOICES`.
    """

    hit_pages: int
    miss_pages: int
    selected_tokens: int
    selections: int
    capped_selections: int
    invalid_scores: int
    malformed_selections: int
    away_pages: int
    decode_read_bytes: int
    prefill_read_bytes: int
    written_bytes: int
    extensions: Mapping[str, int]
    choices: Mapping[str, int]

    @property
    def hit_ratio(self) -> float:
        """Hits per selected page; 1.0 before the first selection."""
        selected = self.hit_pages + self.miss_pages
        return self.hit_pages / selected if selected else 1.0


class Counters:
    """Sums by name: tensors are summed on the device, numbers on the host.

    Args:
        device: where tensors are summed.
        names: further counters on the device, those of the extensions.

    Attributes:
        selected: ``[3] int64`` on the device: hits, misses and malformed selections.
    """

    def __init__(self, device: torch.device, names: Iterable[str] = ()) -> None:
        self._names = (*_ON_DEVICE, *names)
        self._totals = torch.zeros(len(self._names), dtype=torch.int64, device=device)
        self.selected = self._totals[:3]
        pin = device.type == "cuda"
        self._published = torch.zeros(len(self._names), dtype=torch.int64, pin_memory=pin)
        self._waiting: dict[str, list[Tensor]] = {name: [] for name in self._names}
        self._on_host: Counter[str] = Counter()

    def count(self, name: str, values: Tensor) -> None:
        """Add numbers or bools ``[...]``, negative ones as 0; :meth:`publish` sums them."""
        self._waiting[name].append(values.flatten())

    def total(self, name: str) -> Tensor:
        """``[1] int64`` on the device: the sum itself, for kernels that add to it."""
        at = self._names.index(name)
        return self._totals[at : at + 1]

    def add(self, name: str, number: int) -> None:
        """Add a number on the host."""
        self._on_host[name] += number

    def publish(self) -> None:
        """Start copying the device's sums to the host on the current stream, without waiting."""
        for name, waiting in self._waiting.items():
            if waiting:
                # A row that diff_tables refused has -1 pages away.
                self.total(name).add_(torch.cat(waiting).clamp(min=0).sum())
                waiting.clear()
        self._published.copy_(self._totals, non_blocking=True)

    def totals(self) -> Counter[str]:
        """Totals by name, as of the last :meth:`publish` that the device has finished."""
        on_device = zip(self._names, self._published.tolist(), strict=True)
        return self._on_host + Counter(dict(on_device))

    def stats(self, *, page_tokens: int, page_bytes: int) -> CacheStats:
        """The totals as users see them.

        Args:
            page_tokens: S.
            page_bytes: bytes of one device page.
        """
        totals = self.totals()
        on_device = {name: totals[name] for name in _ON_DEVICE}
        selected = totals["hit_pages"] + totals["miss_pages"]
        return CacheStats(
            **on_device,
            selected_tokens=selected * page_tokens + totals["other_tokens"],
            selections=totals["selections"],
            decode_read_bytes=totals["miss_pages"] * page_bytes + totals["streamed_decode_bytes"],
            prefill_read_bytes=totals["prefill_read_bytes"],
            written_bytes=totals["written_bytes"],
            extensions={name: totals[name] for name in self._names[len(_ON_DEVICE) :]},
            choices={name: totals[name] for name in CHOICES},
        )
