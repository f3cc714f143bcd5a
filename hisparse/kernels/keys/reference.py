"""Exact logits of keys in PyTorch: the oracle of the other implementation."""

import torch
from torch import Tensor

from hisparse.kernels.attention.reference import cap_logits
from hisparse.kernels.keys.op import HostKeys
from hisparse.kernels.quantize.reference import decode_latents, read_scales


def key_score(
    query: Tensor,
    keys: HostKeys,
    host_page_table: Tensor,
    num_pages: Tensor,
    reduce: str,
    logit_cap: float,
) -> Tensor:
    """See :func:`hisparse.kernels.key_score`."""
    page = torch.arange(host_page_table.shape[1])
    absent = (page >= num_pages[:, None])[:, None].expand(-1, query.shape[1], -1)
    page_keys = read_keys(keys, host_page_table.masked_fill(absent.all(1), 0))
    grouped = query.unflatten(1, (page_keys.shape[2], -1))[:, None, :, None]
    # Not a matrix product: the order of its sums could depend on the number of pages.
    logits = (grouped * page_keys[..., None, :]).sum(-1)  # [B, P, Hkv, S, G]
    logits = cap_logits(logits, logit_cap)
    by_page = logits.amax(3) if reduce == "max" else logits.logsumexp(3)
    scores: Tensor = by_page.flatten(2).transpose(1, 2).masked_fill(absent, -torch.inf)
    return scores


def read_keys(keys: HostKeys, pages: Tensor) -> Tensor:
    """The keys of ``pages [B, P] int32``, decoded: ``[B, P, Hkv, S, D] float32``."""
    if keys.row is not None:
        shape = (*pages.shape, *keys.k.shape[1:3], keys.row.width)
        decoded = torch.empty(pages.numel(), keys.k.shape[2], keys.row.width)
        decode_latents(keys.k[:, 0], pages.flatten(), decoded, keys.row)
        return decoded.view(shape)
    found = keys.k[pages.long()].float()
    if keys.scales is not None:
        found *= read_scales(keys.scales[pages.long()])[..., :1]
    return found
