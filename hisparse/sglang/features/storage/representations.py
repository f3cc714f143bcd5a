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

from hisparse.cache.serializer import PageSerializer
from hisparse.config import EXTENSIONS
from hisparse.options import StorageOptions
from hisparse.sglang.features.storage.calls import StorageCounters
from hisparse.sglang.features.storage.records import RecordStore
from hisparse.storage import Namespace

logger = logging.getLogger("hisparse")

#: Counted up when the order of bytes changes, or what an algorithm's entries mean.
_FORMAT_VERSION: Final = 4


def representation_namespace(pages: Namespace, session: Any, record_bytes: int) -> Namespace:
    """The namespace of representations.

    Args:
        pages: the namespace of K and V.
        session: this rank's session; its engine has the representations.
        record_bytes: bytes of a record.
    """
    kinds, extensions = session.coordinator.representations.describe(), _extensions(session)
    options = {
        name: [repr(x), EXTENSIONS.get(name).store_version] for name, x in extensions.items()
    }
    algorithm, device = session.coordinator.algorithm, session.coordinator.policy.device
    # GPUs and CPUs may read the same entries in orders of their own.
    texts = [pages.text, device, repr(algorithm), str(algorithm.store_version)]
    texts += [json.dumps(x, sort_keys=True) for x in (kinds, options)]
    return replace(
        pages,
        model=xxhash.xxh3_128_hexdigest("\n".join(texts).encode()),
        kv_dtype="representations",
        page_bytes=record_bytes,
        version=_FORMAT_VERSION,
    )


def _extensions(session: Any) -> dict[str, Any]:
    """Options of the extensions that keep representations, which are named after them."""
    owners = {name.partition(".")[0] for name in session.coordinator.representations.describe()}
    extensions = session.setup.resolved.config.extensions
    return {name: options for name, options in extensions.items() if name in owners}


def representation_records(
    session: Any, options: StorageOptions, pages: RecordStore
) -> RecordStore | None:
    """Records of representations beside pages; None: they are built from the keys of pages.

    Args:
        session: this rank's session, before its first request.
        pages: records of K and V.
    """
    if options.backend != "file":
        return None
    entries, of_kv = session.coordinator.rebuilt_entries(), pages.serializer
    serializer = PageSerializer(of_kv.host, of_kv.page_tokens, entries, with_kv=False)
    if not 0 < serializer.record_bytes <= of_kv.record_bytes:
        which = "larger than K and V" if serializer.record_bytes else "none that only pages have"
        why = f"there are {which}"
    else:
        owners = [type(session.coordinator.algorithm), *map(EXTENSIONS.get, _extensions(session))]
        unversioned = [x.__name__ for x in owners if x.store_version is None]
        why = f"{unversioned[0]} declares no store_version" if unversioned else ""
    if why:
        logger.info("hisparse: storage: no representations are stored: %s", why)
        return None
    assert pages.namespace is not None, "it is set before"
    own = representation_namespace(pages.namespace, session, serializer.record_bytes)
    return pages.within(
        own,
        serializer=serializer,
        threads=1,
        otherwise="their representations are built",
        counters=StorageCounters(),  # Those of a server are of K and V.
    )
