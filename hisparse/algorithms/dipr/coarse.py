"""DIPR's coarse index: reads only pages with an upper bound in range."""

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
#: Ranges are widened by this fraction of each value, so that a float32 bound holds for every order
#: of summation, in the bound and in the exact products.
_WIDER = 1e-4
#: Number of pages that are scored first, those with the highest bounds: their best logit decides
#: which other pages are scored.
_FIRST = 8


def range_representation(kv: KVSpec) -> dict[str, Representation]:
    """Declare channel-wise maxima of a page's keys, then minima; bfloat16, rounded outward."""
    return {_RANGES: Representation((kv.num_kv_heads, 2 * kv.head_dim), torch.bfloat16)}


def store_ranges(
    keys: Tensor, layer_id: int, host_pages: Tensor, stored: Mapping[str, Tensor]
) -> None:
    """Store the ranges of complete pages ``keys [P, S, Hkv, D]`` at ``host_pages [P]``."""
    high, low = keys.float().amax(1), keys.float().amin(1)
    high = round_outward(high + _WIDER * high.abs(), torch.bfloat16, up=True)
    low = round_outward(low - _WIDER * low.abs(), torch.bfloat16, up=False)
    stored[_RANGES][layer_id, host_pages.long()] = torch.cat([high, low], -1)


def coarse_scores(
    query: Tensor, layer_id: int, step: DecodeStep, rest: Tensor, within: float
) -> Tensor:
    """Best logit of each page; -inf for pages with a bound out of range.

    Pages in range have the scores of a flat scan, bit for bit. A page is left out only if its bound
    is below the best logit of a few other pages minus ``within``, hence also below the best logit
    of all pages minus ``within``.

    Args:
        query: ``[B, Hq, D] float32``, times the softmax scale.
        layer_id: layer number.
        step: the step.
        rest: ``[B, Hq] float32``, best logit of the tail page.
        within: beta in units of logits.

    Returns:
        ``[B, Hq, max_pages] float32``.
    """
    table, num_pages = step.host_page_table[:, : step.max_pages], step.num_pages
    keys = step.host_keys(layer_id)
    ranges = step.representations[_RANGES][layer_id][:, None]
    bounds = page_score(query, ranges, table, num_pages)
    highest = bounds.topk(min(_FIRST, bounds.shape[-1]), dim=-1).indices
    first = torch.zeros_like(bounds, dtype=torch.bool).scatter_(-1, highest, True)
    found = key_score(query, keys, table, num_pages, pages=first)
    best = torch.maximum(rest, found.amax(-1))
    # The difference is rounded as well.
    least = best - within - _WIDER * (best.abs() + within)
    return key_score(query, keys, table, num_pages, pages=bounds >= least[..., None])
