"""Representations of pages in a store: records beside those of K and V.

A load without them has to build them from the keys. They depend on the algorithm, K and V do not:
so they are records of their own, which only servers with the same algorithm find.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
import xxhash
from torch import Tensor

from hisparse.options import StorageOptions
from hisparse.sglang.features.storage.calls import StorageCounters
from hisparse.sglang.features.storage.records import RecordStore
from hisparse.storage import Namespace
from hisparse.storage.fingerprint import is_built_in

logger = logging.getLogger("hisparse")

#: Counted up when the order of bytes changes, or what an algorithm's entries mean.
_FORMAT_VERSION: Final = 2


class RepresentationFormat:
    """Moves representations between the engine's tensors and the bytes of a store.

    A record has the entries of one page of SGLang: by name, of all layers, of all its host pages.

    Args:
        entries: tensors ``[L, host pages, ...]``, by name.
        pages_per_record: host pages of a page of SGLang.

    Attributes:
        pages_per_record: as given.
        record_bytes: bytes of a record.
    """

    def __init__(self, entries: Mapping[str, Tensor], pages_per_record: int) -> None:
        # PyTorch does not index float8.
        self._entries = [
            x.view(torch.uint8) if x.dtype.itemsize == 1 else x
            for x in (entries[name] for name in sorted(entries))
        ]
        self.pages_per_record = pages_per_record
        self.record_bytes = pages_per_record * sum(x[:, 0].nbytes for x in self._entries)

    def read(self, pages: Tensor, out: Tensor) -> None:
        """Copy entries of ``pages [n * pages_per_record] int64`` to ``out [n, bytes] uint8``."""
        offset = 0
        for each in self._entries:
            found = each[:, pages.to(each.device)].cpu().contiguous()
            by_record = found.view(len(found), len(out), -1).view(torch.uint8).transpose(0, 1)
            width = by_record[0].numel()
            out[:, offset : offset + width].view(by_record.shape).copy_(by_record)
            offset += width

    def write(self, pages: Tensor, data: Tensor) -> None:
        """Copy records ``data [n, bytes] uint8`` to the entries of ``pages [n * per record]``."""
        offset = 0
        for each in self._entries:
            shape = (len(each), len(pages), *each.shape[2:])
            width = each[:, 0].nbytes * self.pages_per_record
            by_record = data[:, offset : offset + width].view(len(data), len(each), -1)
            # A copy, since the record may begin where the dtype does not.
            copied = by_record.transpose(0, 1).clone(memory_format=torch.contiguous_format)
            entries = copied.view(-1).view(each.dtype).view(shape)
            each[:, pages.to(each.device)] = entries.to(each.device)
            offset += width
        if any(each.is_cuda for each in self._entries):
            # The forward that reads them runs on another stream.
            torch.cuda.current_stream().synchronize()


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
    options = {n: repr(x) for n, x in session.resolved.config.extensions.items() if n in owners}
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
    assert pages.namespace is not None, "it is set before"
    own = representation_namespace(pages.namespace, session, form.record_bytes)
    # The counters of a server are those of K and V.
    return pages.within(own, form=form, counters=StorageCounters())
