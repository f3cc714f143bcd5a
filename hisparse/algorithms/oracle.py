"""Oracle: the exact page scores, which every other page score approximates; reads all keys."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from hisparse.algorithms.base import register_algorithm
from hisparse.algorithms.page_score import PageScoreAlgorithm
from hisparse.algorithms.step import DecodeStep, SelectionPolicy
from hisparse.kernels import HostKeys, key_score
from hisparse.types import KVSpec


@register_algorithm("oracle")
@dataclass(frozen=True, kw_only=True)
class Oracle(PageScoreAlgorithm):
    """Keeps the pages with the most attention mass, by exact logits.

    A reference for measuring, not for serving: it keeps a copy of all keys on the device. With
    pages of one token it is the exact top-k.
    """

    captured_launches: ClassVar[int] = 12

    def summary_shape(self, kv: KVSpec) -> tuple[int, ...]:
        return (kv.page_size, kv.num_kv_heads, kv.head_dim)

    def summarize(self, keys: Tensor, mask: Tensor) -> Tensor:
        """Return ``keys [P, S, Hkv, D]``, any float dtype; ``mask [P, S] bool`` is all true."""
        return keys

    def captured_bytes(self, policy: SelectionPolicy, num_pages: int) -> int:
        """The gathered keys, their copy, and the logits of all tokens."""
        kv = policy.kv
        logits = num_pages * kv.page_size * kv.num_q_heads * kv.dtype.itemsize
        return super().captured_bytes(policy, num_pages) + logits

    def score(self, query: Tensor, summaries: Tensor) -> Tensor:
        """``query [B, Hq, D]``, ``summaries [B, P, S, Hkv, D]`` -> ``[B, Hq, P]``; higher is kept.

        Any float dtypes; the result has that of the query.
        """
        keys = summaries.permute(0, 3, 4, 1, 2).flatten(3).to(query.dtype)
        logits = query.unflatten(1, (keys.shape[1], -1)) @ keys
        scores: Tensor = logits.unflatten(-1, (summaries.shape[1], -1)).logsumexp(-1)
        return scores.flatten(1, 2)

    def score_pages(self, query: Tensor, layer_id: int, step: DecodeStep) -> Tensor:
        """``query [B, Hq, D]``, model's dtype -> ``[B, Hq, P]``, any float dtype; higher is kept.

        A CPU reads the keys in place.
        """
        if query.device.type != "cpu":
            return super().score_pages(query, layer_id, step)
        return key_score(
            step.scaled(query),
            HostKeys(step.representations["summary"][layer_id].transpose(1, 2)),
            step.host_page_table[:, : step.max_pages],
            step.num_pages,
            reduce="lse",
            logit_cap=step.policy.logit_cap,
        )
