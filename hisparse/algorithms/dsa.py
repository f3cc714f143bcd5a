"""DSA: DeepSeek-V3.2's lightning indexer. https://arxiv.org/abs/2512.02556"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hisparse.algorithms.base import BaseSparseAlgorithm, Representation, register_algorithm
from hisparse.algorithms.step import DecodeStep, PrefillStep, SelectionPolicy
from hisparse.errors import ConfigError, HiSparseError
from hisparse.kernels import select
from hisparse.types import IndexerInputs, Selection, SelectionScope

__all__ = ["DSA"]

#: Products q.k per block, over all heads of the indexer: a block fits the processor's cache.
_BLOCK = 2**18
#: Queries of a prompt per block: limits the memory for scores.
_QUERY_BLOCK = 64

_KEY, _SCALE = "index_key", "index_scale"


@register_algorithm("dsa")
@dataclass(frozen=True, kw_only=True)
class DSA(BaseSparseAlgorithm):
    """Attends the tokens that the model's own indexer scores highest, as in the model's training.

    A token's score is ``sum_h weights_h * relu(queries_h . key)`` (equation 1 of the paper). All
    heads share one selection; in prefill each query has its own. To attend as the model does, set
    ``budget`` to its ``index_topk``, and ``num_sink_pages`` and ``num_recent_pages`` to 0, so that
    only the best tokens are kept.

    Attributes:
        index_dtype: dtype of the stored keys. Each fp8 key has a power of two as scale, as in
            DeepSeek ("ue8m0"); queries are not rounded.
    """

    index_dtype: Literal["float8_e4m3fn", "bfloat16", "float32"] = "float8_e4m3fn"

    scopes: ClassVar[tuple[SelectionScope, ...]] = ("layer",)
    page_sizes: ClassVar[tuple[int, ...] | None] = (1,)
    indexer: ClassVar[bool] = True
    ranks_tail: ClassVar[bool] = True

    def representations(self, policy: SelectionPolicy) -> dict[str, Representation]:
        width = policy.kv.index_head_dim
        if not width:
            raise ConfigError(
                "algorithm dsa got a model without an indexer, expected one such as DeepSeek-V3.2; "
                "algorithms for any model: sketch, quest, snapkv"
            )
        kinds = {_KEY: Representation((width,), self._dtype)}
        return kinds | {_SCALE: Representation((), torch.float32)} if self._scaled else kinds

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.index_dtype)
        return dtype

    @property
    def _scaled(self) -> bool:
        return self._dtype.itemsize == 1

    def construct_representations(
        self, keys: Tensor, queries: Tensor, layer_id: int, step: PrefillStep
    ) -> None:
        self._store(_inputs(step), layer_id, step.host_pages, step)

    def update_representations(
        self, keys: Tensor, layer_id: int, host_pages: Tensor, step: DecodeStep
    ) -> None:
        self._store(_inputs(step), layer_id, host_pages, step)

    def _store(
        self, new: IndexerInputs, layer_id: int, pages: Tensor, step: PrefillStep | DecodeStep
    ) -> None:
        """Write the keys ``[T, Di]`` of tokens to their host pages ``[T]``."""
        keys = new.keys.float()
        if self._scaled:
            largest = torch.finfo(self._dtype).max
            scale = (keys.abs().amax(-1).clamp(min=1e-4) / largest).log2().ceil().exp2()
            step.representations[_SCALE][layer_id, pages] = scale
            keys = keys / scale[:, None]
        step.representations[_KEY][layer_id, pages] = keys.to(self._dtype)

    def _score(
        self, new: IndexerInputs, layer_id: int, table: Tensor, step: PrefillStep | DecodeStep
    ) -> Tensor:
        """Score the keys at host pages ``table [N, P]`` for ``new``, inputs of N * T tokens.

        Returns:
            ``[N, T, P] float32``; higher is kept.
        """
        queries, weights = (
            x.float().unflatten(0, (len(table), -1)) for x in (new.queries, new.weights)
        )
        stored = step.representations[_KEY][layer_id]
        scores: Tensor = queries.new_empty(*queries.shape[:2], table.shape[1])
        for part in _blocks(table.shape[1], max(1, _BLOCK // queries[..., 0].numel())):
            pages = table[:, part]
            keys = _to_float(stored.index_select(0, pages.flatten())).unflatten(0, pages.shape)
            products = (queries.flatten(1, 2) @ keys.mT).relu_().unflatten(1, weights.shape[1:])
            scores[..., part] = (weights[:, :, None] @ products)[:, :, 0]
        if self._scaled:
            scores *= step.representations[_SCALE][layer_id][table.long()][:, None]
        return scores

    def retrieve_topk(self, queries: Tensor, layer_id: int, step: DecodeStep) -> Selection:
        new = _inputs(step)
        table = step.host_page_table[:, : step.max_pages + 1]
        scores = self._score(new, layer_id, table, step)
        # The new token's key is not stored yet.
        products = (new.queries.float() @ new.keys.float()[..., None]).relu_()[..., 0]
        tail = (new.weights.float() * products).sum(-1)
        scores.scatter_(2, step.num_pages.long()[:, None, None], tail[:, None, None])
        pages, lengths = _best(scores, step.num_pages + 1, step.policy)
        # A selection never lists the tail page: a shorter selection means that it is attended.
        is_tail = pages == step.num_pages[:, None, None]
        return Selection(pages.masked_fill(is_tail, -1), lengths - is_tail.sum(-1).int())

    def select_prefill(self, layer_id: int, step: PrefillStep) -> Tensor | None:
        end = step.start + step.length
        if end <= step.policy.max_pages:
            return None
        new, table = _inputs(step), step.context_pages[None]
        counts = torch.arange(step.start + 1, end + 1, dtype=torch.int32, device=table.device)
        parts = []
        for part in _blocks(step.length, _QUERY_BLOCK):
            scores = self._score(new.take(part), layer_id, table, step)
            parts.append(_best(scores.movedim(1, 0), counts[part], step.policy).pages[:, 0])
        return torch.cat(parts)


def _best(scores: Tensor, count: Tensor, policy: SelectionPolicy) -> Selection:
    """The best of the first ``count [N]`` tokens by ``scores [N, 1, P]``; the first of equal ones.

    The last of these tokens is the new one, the tail page. It is kept if recent pages are.
    """
    forced = policy.forced_pages(count - 1, scores.shape[-1])
    if policy.num_recent_pages:
        forced = forced.scatter(1, count.long()[:, None] - 1, True)
    return select(scores, count, replace(policy.rule, heads=1), forced=forced)


def _inputs(step: PrefillStep | DecodeStep) -> IndexerInputs:
    if step.indexer is None:
        raise HiSparseError(
            "algorithm dsa got no indexer inputs from the model, expected queries, keys and "
            "weights of every token"
        )
    return step.indexer


def _to_float(keys: Tensor) -> Tensor:
    """Convert stored keys to float32, exactly.

    A half has the bits of the e4m3 number, with an exponent bias that is larger by 8. PyTorch's
    own conversion takes four times as long on a CPU.
    """
    if keys.dtype != torch.float8_e4m3fn or keys.device.type != "cpu":
        return keys.float()
    bits = keys.view(torch.uint8).to(torch.int16)
    halves = (bits << 8 & -0x8000) | (bits << 7 & 0x3F80)
    return halves.view(torch.float16).float().mul_(2**8)


def _blocks(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))
