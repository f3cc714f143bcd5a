"""How many pages a selection keeps."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["SelectRule"]


class SelectRule(NamedTuple):
    """The parameters of :func:`hisparse.kernels.select`; ``mass`` or ``within``, or neither."""

    heads: int
    max_pages: int
    num_sinks: int
    num_recents: int
    mass: float | None = None
    within: float | None = None
