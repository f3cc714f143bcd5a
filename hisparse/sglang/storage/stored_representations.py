"""Loads and stores the representations of pages whose K and V a store has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hisparse.cache.exact_pages import ExactPages
from hisparse.sglang.storage.counters import StorageCounters
from hisparse.sglang.storage.health import StorageHealth
from hisparse.sglang.storage.load import PageLoader
from hisparse.sglang.storage.offload import PageWriter
from hisparse.sglang.storage.page_storage import PageStorage, Staging
from hisparse.sglang.storage.representations import RepresentationFormat
from hisparse.sglang.storage.unread import UnreadKeys

__all__ = ["StoredRepresentations"]


class StoredRepresentations:
    """Reads and writes representations as K and V are read and written, with counters of its own.

    What is not there is built, so no fault of the store shows but in time.

    Args:
        storage: the records of representations.
        form: moves them.
        staging: memory for records, at least as long.
        health: time limits, those of K and V.
        exact: says which pages may be shared.
        max_pages: most pages that may wait to be written.
    """

    def __init__(
        self,
        storage: PageStorage,
        form: RepresentationFormat,
        staging: Staging,
        health: StorageHealth,
        exact: ExactPages,
        max_pages: int,
    ) -> None:
        self._storage = storage
        self._per_record = form.pages_per_record
        # The counters of a server are those of K and V.
        common = (storage, form, staging, health, StorageCounters(), UnreadKeys())
        self._loader = PageLoader(*common, 1)
        self.writer = PageWriter(*common, exact, max_pages)

    def load(self, names: Sequence[str], pages: Tensor, ready: Sequence[Any]) -> Tensor:
        """Load representations of pages that have K and V.

        Args:
            names: of the records.
            pages: ``[records * pages_per_record] int64``, host pages.
            ready: events after which no forward writes to them.

        Returns:
            The pages ``[n] int64`` that lack representations.
        """
        found = self._loader.find(names)
        num_pages = found * self._per_record
        if found and self._loader.load(names[:found], pages[:num_pages], ready):
            return pages[num_pages:]
        return pages

    def close(self) -> None:
        """End the threads."""
        self.writer.close()
        self._loader.close()
