"""The pages that requests are filling, as a kernel reads them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from hisparse.types import StoredKV

__all__ = ["TailPages"]


class TailPages(NamedTuple):
    """Tail pages in the device pool, one a row.

    Attributes:
        kv: ``[N, Hr, S, D]`` pages, see :class:`hisparse.types.StoredKV`.
        pages: ``[R] int32``, the page of each row. The rows of a request lie side by side: one with
            the keys of all heads (Hr = Hkv), or one or more for each KV head (Hr = 1).
        lens: ``[R] int32``, tokens of each page.
    """

    kv: StoredKV
    pages: Tensor
    lens: Tensor
