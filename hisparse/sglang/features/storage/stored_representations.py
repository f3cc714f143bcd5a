"""Loads and stores the representations of pages whose K and V a store has."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hisparse.cache.shareable_pages import ShareablePages
from hisparse.engine.fingerprint import is_built_in
from hisparse.options import StorageOptions
from hisparse.sglang.features.storage.counters import StorageCounters
from hisparse.sglang.features.storage.load import PageLoader
from hisparse.sglang.features.storage.offload import PageWriter
from hisparse.sglang.features.storage.records import Records
from hisparse.sglang.features.storage.representations import (
    RepresentationFormat,
    representation_namespace,
)
from hisparse.storage import Namespace

__all__ = ["StoredRepresentations", "make_stored_representations"]

logger = logging.getLogger("hisparse")


class StoredRepresentations:
    """Reads and writes representations as K and V are read and written.

    What is not there is built, so no fault of the store shows but in time.

    Args:
        records: of representations.
        exact: says which pages may be shared.
        max_pages: most pages that may wait to be written.

    Attributes:
        writer: writes them.
        record_bytes: bytes of a record.
    """

    def __init__(self, records: Records, exact: ShareablePages, max_pages: int) -> None:
        self._storage = records.storage
        self._per_record = records.form.pages_per_record
        self._loader = PageLoader(records, 1, "their representations are built")
        self.writer = PageWriter(records, exact, max_pages)
        self.record_bytes = records.form.record_bytes

    def use(self, namespace: Namespace) -> None:
        """Address records in ``namespace`` from now on."""
        self._storage.use(namespace)

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
        """End the threads that load."""
        self._loader.close()


def make_stored_representations(
    session: Any,
    options: StorageOptions,
    pages: Records,
    namespace: Namespace,
    exact: ShareablePages,
    max_pages: int,
) -> StoredRepresentations | None:
    """What keeps representations beside pages; None: they are built from the keys of pages.

    Args:
        session: this rank's session, before its first request.
        options: of the storage.
        pages: records of K and V.
        namespace: of these.
        exact, max_pages: as for :class:`StoredRepresentations`.
    """
    if options.representations == "built" or options.backend != "file":
        return None
    plugins = [session.algorithm, *session.resolved.config.extensions.values()]
    foreign = [type(x).__name__ for x in plugins if not is_built_in(x)]
    if foreign:
        logger.info(
            "hisparse: storage: no representations are stored: %s is a plug-in, whose constants "
            "the store cannot tell apart",
            foreign[0],
        )
        return None
    form = RepresentationFormat(session.coordinator.rebuilt_entries(), pages.form.pages_per_record)
    if not 0 < form.record_bytes <= pages.form.record_bytes:
        why = "larger than K and V" if form.record_bytes else "none that pages alone have"
        logger.info("hisparse: storage: no representations are stored: there are %s", why)
        return None
    # The counters of a server are those of K and V.
    records = replace(pages, form=form, counters=StorageCounters())
    own = representation_namespace(namespace, session, form.record_bytes)
    return StoredRepresentations(records.within(own), exact, max_pages)
