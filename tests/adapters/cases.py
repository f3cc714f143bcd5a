"""Inputs of ``attend`` as in the decode path. Everything that must not be read is NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hisparse.types import AttentionRule, KVSpec, PagedKV, SelectionScope
from tests.shapes import TWO_LAYERS


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of ragged lengths over scattered pages.

    Attributes:
        scope: selection scope.
        size: tokens per page.
        latent: whether values are the keys' first columns.
        dtype: of keys, values and queries.
        lens: tokens of each row.
        device: device of the tensors.
        seed: seed of the random values.
        logit_cap, window: as for ``AttentionRule``.
    """

    scope: SelectionScope = "kv_head"
    size: int = 16
    latent: bool = False
    dtype: torch.dtype = torch.bfloat16
    lens: tuple[int, ...] = (37, 0, 1, 64, 16, 33)
    device: str = "cpu"
    seed: int = 0
    logit_cap: float = 0.0
    window: int = 0

    @property
    def spec(self) -> KVSpec:
        """Two KV heads of four query heads each, or DeepSeek's latent under 16 heads."""
        spec = replace(TWO_LAYERS, num_layers=1, dtype=self.dtype, page_size=self.size)
        shape = {"num_q_heads": 16, "num_kv_heads": 1, "head_dim": 576, "v_head_dim": 512}
        return replace(spec, attention="MLA", **shape) if self.latent else spec

    @property
    def rule(self) -> AttentionRule:
        """How a layer attends."""
        return AttentionRule(self.spec.head_dim**-0.5, self.logit_cap, self.window)

    @property
    def queries(self) -> int:
        """Query heads of a row."""
        return self.spec.num_q_heads // self.spec.selection_heads(self.scope)

    def arguments(self) -> tuple[Tensor, PagedKV, Tensor, Tensor, AttentionRule]:
        """``q, kv, page_table, seq_lens, rule``."""
        torch.manual_seed(self.seed)
        spec, rows = self.spec, len(self.lens)
        stored_heads = spec.num_kv_heads if self.scope == "layer" else 1
        counts = [-(-n // self.size) for n in self.lens]
        width = max(counts) + 2
        total = rows * width
        table = torch.randperm(total).int().view(rows, width)
        unread = torch.ones(total, self.size, dtype=torch.bool)
        for row, length in enumerate(self.lens):
            for token in range(self.oldest(length), length):
                unread[table[row, token // self.size], token % self.size] = False
            table[row, counts[row] :] = -1
            table[row, : self.oldest(length) // self.size] = -1

        def pages(width: int) -> Tensor:
            shape = (total, self.size, stored_heads, width)
            filled = torch.randn(shape).masked_fill(unread[..., None, None], torch.nan)
            return filled.to(self.device, self.dtype).transpose(1, 2)

        k = pages(spec.head_dim)
        v = k[..., : spec.v_head_dim] if self.latent else pages(spec.v_head_dim)
        q = torch.randn(rows, self.queries, spec.head_dim).to(self.device, self.dtype)
        lens = torch.tensor(self.lens, dtype=torch.int32, device=self.device)
        return q, PagedKV(k, v), table.to(self.device), lens, self.rule

    def oldest(self, length: int) -> int:
        """The first token that a row of ``length`` tokens reads."""
        return max(0, length - self.window) if self.window else 0

    def tokens(self) -> list[list[int]]:
        """``page * S + offset`` of the tokens that each row must read, in order."""
        table = self.arguments()[2].tolist()
        return [
            [
                row[token // self.size] * self.size + token % self.size
                for token in range(self.oldest(length), length)
            ]
            for row, length in zip(table, self.lens, strict=True)
        ]

    def __str__(self) -> str:
        kind = "mla" if self.latent else self.scope
        rule = f"-cap{self.logit_cap:g}-window{self.window}" if self.window else ""
        return f"{kind}-page{self.size}-{str(self.dtype).split('.')[1]}{rule}"


def cases(**settings: Any) -> list[Case]:
    """Every scope and MLA, pages of 1 and of 16 tokens."""
    kinds: list[dict[str, Any]] = [
        {"scope": "layer"},
        {"scope": "kv_head"},
        {"scope": "query_head"},
        {"scope": "layer", "latent": True},
    ]
    return [Case(size=size, **kind, **settings) for kind in kinds for size in (1, 16)]
