"""A disk that is full, as processes see it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["largest_file"]


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Files of this process and its children end at so many bytes: writing beyond is an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
