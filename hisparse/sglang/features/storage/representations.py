"""Representations of pages in a store: records beside those of K and V.

A load without them has to build them from the keys. They depend on the algorithm, K and V do not:
so they are records of their own, which only servers with the same algorithm find.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any, Final

import xxhash

from hisparse.cache.serializer import EntrySerializer
from hisparse.options import StorageOptions
from hisparse.sglang.features.storage.calls import StorageCounters
from hisparse.sglang.features.storage.records import RecordStore
from hisparse.storage import Namespace
from hisparse.storage.fingerprint import is_built_in

logger = logging.getLogger("hisparse")

#: Counted up when the order of bytes changes, or what an algorithm's entries mean.
_FORMAT_VERSION: Final = 2


def representation_namespace(pages: Namespace, session: Any, record_bytes: int) -> Namespace:
    """The namespace of representations.

    Args:
        pages: the namespace of K and V.
        session: this rank's session; its engine has the representations.
        record_bytes: bytes of a record.
    """
    coordinator = session.coordinator
    kinds = coordinator.representations.describe()
    # What extensions keep is named after them.
    owners = {name.partition(".")[0] for name in kinds}
    extensions = session.setup.resolved.config.extensions
    options = {name: repr(x) for name, x in extensions.items() if name in owners}
    texts = [pages.text, repr(coordinator.algorithm)]
    texts += [json.dumps(x, sort_keys=True) for x in (kinds, options)]
    return replace(
        pages,
        model=xxhash.xxh3_128_hexdigest("\n".join(texts).encode()),
        kv_dtype="representations",
        page_bytes=record_bytes,
        version=_FORMAT_VERSION,
    )


def representation_records(
    session: Any, options: StorageOptions, pages: RecordStore
) -> RecordStore | None:
    """Records of representations beside pages; None: they are built from the keys of pages.

    Args:
        session: this rank's session, before its first request.
        options: of the storage.
        pages: records of K and V.
    """
    if options.representations == "built" or options.backend != "file":
        return None
    plugins = [session.setup.algorithm, *session.setup.resolved.config.extensions.values()]
    foreign = [type(x).__name__ for x in plugins if not is_built_in(x)]
    if foreign:
        logger.info(
            "hisparse: storage: no representations are stored: %s is a plug-in, whose constants "
            "the store cannot tell apart",
            foreign[0],
        )
        return None
    serializer = EntrySerializer(
        session.coordinator.rebuilt_entries(), pages.serializer.pages_per_record
    )
    if not 0 < serializer.record_bytes <= pages.serializer.record_bytes:
        why = "larger than K and V" if serializer.record_bytes else "none that pages alone have"
        logger.info("hisparse: storage: no representations are stored: there are %s", why)
        return None
    assert pages.namespace is not None, "it is set before"
    own = representation_namespace(pages.namespace, session, serializer.record_bytes)
    # The counters of a server are those of K and V.
    return pages.within(own, serializer=serializer, counters=StorageCounters())
