"""What the ranks of a server have in common with each other when they share prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

__all__ = ["LinkerRanks"]


@dataclass(frozen=True, kw_only=True)
class LinkerRanks:
    """The ranks that divide a model's heads.

    Attributes:
        rank: of this process.
        size: number of ranks.
        shared: whether all ranks have the same K and V (MLA), so that one writes for all.
        group: of PyTorch; None: this is the only rank.
    """

    rank: int
    size: int
    shared: bool
    group: Any

    @classmethod
    def of(cls, params: Any, *, shared: bool) -> LinkerRanks:
        """The ranks of SGLang's ``CacheInitParams``."""
        group = params.attn_tp_cache_group or params.tp_cache_group
        if group is None or not torch.distributed.is_initialized():
            return cls(rank=0, size=1, shared=shared, group=None)
        size = torch.distributed.get_world_size(group=group)
        rank = torch.distributed.get_rank(group=group)
        return cls(rank=rank, size=size, shared=shared, group=group if size > 1 else None)

    @property
    def writes(self) -> bool:
        """Whether this rank writes to the store."""
        return not self.shared or self.rank == 0

    @property
    def key(self) -> tuple[int, int]:
        """Rank and number of ranks in the keys of pages."""
        return (0, 1) if self.shared else (self.rank, self.size)

    def least_of(self, mine: int) -> int:
        """The smallest value of all ranks."""
        if self.group is None:
            return mine
        value = torch.tensor([mine])
        torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MIN, group=self.group)
        return int(value.item())

    def all_of(self, mine: bool) -> bool:
        """Whether the value is true on every rank."""
        return bool(self.least_of(int(mine)))

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, in their order."""
        if self.group is None:
            return [text]
        texts = [""] * self.size
        torch.distributed.all_gather_object(texts, text, group=self.group)
        return texts
