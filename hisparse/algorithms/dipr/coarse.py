"""DIPR's coarse index: bounds of pages tell which ones need not be read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hisparse.algorithms.base import Representation
from hisparse.algorithms.step import DecodeStep
from hisparse.kernels import key_score, page_score, round_outward
from hisparse.types import KVSpec

__all__ = ["coarse_scores", "range_representation", "store_ranges"]

_RANGES = "ranges"
#: Ranges are wider than the keys by this part of each value, so that a bound in float32 stays one
#: whatever the order of its sums and of those of the exact products.
_WIDER = 1e-4
#: Pages with the highest bounds, which are scored first: their best is what the others are held
#: against.
_FIRST = 8


def range_representation(kv: KVSpec) -> dict[str, Representation]:
    """Channel-wise maxima of a page's keys, then minima; bfloat16, rounded outward."""
    return {_RANGES: Representation((kv.num_kv_heads, 2 * kv.head_dim), torch.bfloat16)}


def store_ranges(
    keys: Tensor, layer_id: int, host_pages: Tensor, stored: Mapping[str, Tensor]
) -> None:
    """Ranges of complete pages, ``keys [P, S, Hkv, D]``, written at ``host_pages [P]``."""
    high, low = keys.float().amax(1), keys.float().amin(1)
    high = round_outward(high + _WIDER * high.abs(), torch.bfloat16, up=True)
    low = round_outward(low - _WIDER * low.abs(), torch.bfloat16, up=False)
    stored[_RANGES][layer_id, host_pages.long()] = torch.cat([high, low], -1)


def coarse_scores(
    query: Tensor, layer_id: int, step: DecodeStep, rest: Tensor, within: float
) -> Tensor:
    """Each page's best q.k; -inf for pages whose bound shows that they are out of range.

    What is in range has bit for bit the scores of a flat scan: a page that is left out cannot
    reach the best of a few others minus ``within``, and so not the best of all.

    Args:
        query: ``[B, Hq, D] float32``, times the softmax scale.
        layer_id: layer number.
        step: the step.
        rest: ``[B, Hq] float32``, the best logit of the tail page.
        within: in units of logits.

    Returns:
        ``[B, Hq, max_pages] float32``.
    """
    table, num_pages = step.host_page_table[:, : step.max_pages], step.num_pages
    keys = step.host_keys(layer_id)
    bounds = page_score(query, step.representations[_RANGES][layer_id], table, num_pages)
    highest = bounds.topk(min(_FIRST, bounds.shape[-1]), dim=-1).indices
    first = torch.zeros_like(bounds, dtype=torch.bool).scatter_(-1, highest, True)
    found = key_score(query, keys, table, num_pages, pages=first)
    best = torch.maximum(rest, found.amax(-1))
    # The difference is rounded, too.
    least = best - within - _WIDER * (best.abs() + within)
    return key_score(query, keys, table, num_pages, pages=bounds >= least[..., None])
