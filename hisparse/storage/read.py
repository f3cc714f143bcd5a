"""Reads one page into a caller's buffer, and checks every byte of it."""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Final

import numpy as np

from hisparse.storage.namespace import Namespace
from hisparse.storage.record import BLOCK_BYTES, checksum, checksums_in
from hisparse.storage.segments import OpenSegment, transfer

__all__ = ["make_block", "read_page", "span_of"]

_ALIGNMENT_MASK: Final = BLOCK_BYTES - 1


def make_block() -> memoryview:
    """A buffer for a header, aligned for direct reads. One thread uses it at a time."""
    return memoryview(mmap.mmap(-1, BLOCK_BYTES))


def span_of(namespace: Namespace, part: int | None) -> tuple[int, int]:
    """Offset in the page and bytes of a part; None: of all parts."""
    if part is None:
        return 0, namespace.page_bytes
    return sum(namespace.part_bytes[:part]), namespace.part_bytes[part]


def read_page(
    segment: OpenSegment,
    offset: int,
    namespace: Namespace,
    key: bytes,
    part: int | None,
    view: memoryview,
    block: memoryview,
) -> str | None:
    """Read a page, or a part of it, with one system call if that begins the page.

    Args:
        segment: that has the record.
        offset: of the record in the segment.
        namespace: of the page.
        key: of the page.
        part: number of the part; None: all.
        view: bytes to fill, as many as the part has, or the page.
        block: of :func:`make_block`.

    Returns:
        What is wrong with the record: "short", "header" or "checksum of part N"; None: nothing.

    Raises:
        OSError: the system refuses.
    """
    start, size = span_of(namespace, part)
    read = _fill(segment, offset, start, view, block)
    if read < BLOCK_BYTES + size:
        return "short"
    if (checksums := checksums_in(block, namespace, key)) is None:
        return "header"
    for number in range(len(checksums)) if part is None else [part]:
        first, num_bytes = span_of(namespace, number)
        if checksum(view[first - start :][:num_bytes]) != checksums[number]:
            return f"checksum of part {number}"
    return None


def _fill(
    segment: OpenSegment, offset: int, start: int, view: memoryview, block: memoryview
) -> int:
    """Read header and part. Returns the number of bytes read."""
    # The first part follows the header.
    steps = [([block], 0), ([view], BLOCK_BYTES + start)] if start else [([block, view], 0)]
    if segment.direct_fd is not None and _is_aligned(view, start):
        # The system may want another alignment.
        with contextlib.suppress(OSError):
            fd = segment.direct_fd
            return sum(transfer(os.preadv, fd, views, offset + at) for views, at in steps)
    return sum(transfer(os.preadv, segment.fd, views, offset + at) for views, at in steps)


def _is_aligned(view: memoryview, start: int) -> bool:
    """Whether address, offset and size suit a direct read."""
    address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return not (address | start | len(view)) & _ALIGNMENT_MASK
