"""How selected pages come to the device beside compute."""

from __future__ import annotations

from typing import Literal, NamedTuple

from hisparse.cache.streams import SideStreams, Started
from hisparse.kernels import LruDiff

__all__ = ["Overlap", "SwapIn", "When"]

#: "now": on the forward stream, at once; "beside": what is missing is found at once, and comes on a
#: side stream; "ahead": of the layer, which has not begun: all of it on a side stream.
When = Literal["now", "beside", "ahead"]


class Overlap(NamedTuple):
    """Transfers run beside compute.

    Attributes:
        streams: where.
        split_pages: K, pages of a selection at most, if attention is split by what has to be waited
            for; rows have one device page more, or more. None: it is not.
    """

    streams: SideStreams
    split_pages: int | None = None


class SwapIn(NamedTuple):
    """Selected pages on their way to the device.

    Attributes:
        diff: which are resident, and which come where.
        loaded: those that come.
    """

    diff: Started[LruDiff]
    loaded: Started[None]
