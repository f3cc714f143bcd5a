"""Exact logits of keys in PyTorch: the oracle of the other implementation."""

import torch
from torch import Tensor

from hisparse.kernels.attention.reference import cap_logits


def key_score(
    query: Tensor,
    keys: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    reduce: str,
    logit_cap: float,
) -> Tensor:
    """See :func:`hisparse.kernels.key_score`."""
    page = torch.arange(host_page_table.shape[1])
    absent = (page >= num_pages[:, None])[:, None].expand(-1, query.shape[1], -1)
    page_keys = keys[host_page_table.masked_fill(absent.all(1), 0).long()]  # [B, P, Hkv, S, D]
    grouped = query.unflatten(1, (keys.shape[1], -1))[:, None, :, None]
    # Not a matrix product: the order of its sums could depend on the number of pages.
    logits = (grouped * page_keys.float()[..., None, :]).sum(-1)  # [B, P, Hkv, S, G]
    logits = cap_logits(logits, logit_cap)
    by_page = logits.amax(3) if reduce == "max" else logits.logsumexp(3)
    scores: Tensor = by_page.flatten(2).transpose(1, 2).masked_fill(absent, -torch.inf)
    return scores
