"""Model shapes in the benchmarks of whole layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hisparse.types import KVSpec

__all__ = ["ModelShape"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Shapes of Llama-3.1-8B by default, with another number of layers.

    Attributes:
        layers: layers of the model; each starts with the processor caches that the others left.
        q_heads, kv_heads, head_dim: query heads, KV heads and their width.
        page_size: tokens of a page.
        dtype: dtype of keys and values.
    """

    layers: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def kv(self) -> KVSpec:
        """The shapes as the coordinator takes them."""
        return KVSpec(
            num_layers=self.layers,
            num_q_heads=self.q_heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            dtype=self.dtype,
            page_size=self.page_size,
        )

    def reported(self, *names: str) -> dict[str, Any]:
        """Parameters for a report: the named attributes, then the shapes."""
        names = (*names, "layers", "q_heads", "kv_heads", "head_dim", "page_size")
        return {name: getattr(self, name) for name in names} | {
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "cache": f"as {self.layers} layers leave it",
        }
