"""Memory that the ranks of a node share: one copy of what is the same on all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hisparse.errors import one_line

__all__ = ["NodeRanks", "map_together"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class NodeRanks:
    """The processes of a node that serve one model together.

    Attributes:
        rank: number of this process on its node.
        size: processes of the node.
        gather: gives every process the texts of all, by rank; each of them calls it.
    """

    rank: int
    size: int
    gather: Callable[[str], Sequence[str]]


def map_together(num_bytes: int, ranks: NodeRanks, use: Callable[[int], T]) -> T:
    """Let every rank use the descriptor of one file in memory; each of them calls this.

    The file has no name and no folder: it ends with its last mapping, also after a crash. No rank
    returns before all have mapped it.

    Args:
        num_bytes: size of the file, all zeros.
        ranks: the processes.
        use: maps the file; the descriptor is closed afterwards.

    Raises:
        OSError: in every rank, if one of them fails.
    """
    file, offered, error = -1, "", ""
    try:
        if ranks.rank == 0:
            file = os.memfd_create("hisparse")
            os.ftruncate(file, num_bytes)
            offered = f"/proc/{os.getpid()}/fd/{file}"
    except OSError as failure:
        error = one_line(failure)
    path = ranks.gather(offered)[0]
    try:
        if path:
            if ranks.rank != 0:
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            result = use(file)
    except (OSError, RuntimeError, ValueError) as failure:
        error = one_line(failure)
    errors = ranks.gather(error)
    if file >= 0:
        os.close(file)
    for rank, message in enumerate(errors):
        if message:
            raise OSError(f"rank {rank}: {message}")
    return result
