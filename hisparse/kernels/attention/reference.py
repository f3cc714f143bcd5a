"""Attention in plain PyTorch: the oracle of the other implementations."""

import torch
from torch import Tensor

from hisparse.kernels.operation import new_tensors
from hisparse.kernels.quantize.reference import read_scales
from hisparse.types import AttentionRule, StoredKV

#: Queries per block of a chunk, which limits the memory of the logits.
_QUERY_BLOCK = 512


def paged_attention(
    query: Tensor,
    kv: StoredKV,
    page_table: Tensor,
    seq_lens: Tensor,
    rule: AttentionRule,
    heads: int = 1,
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.paged_attention`."""
    query = query.float() * rule.scale
    rows, num_pages = page_table.shape
    stored_heads, page_size = kv.k.shape[1:3]
    pages = page_table.clamp(min=0).flatten()
    k, v, *scales = (_gather(each, pages, rows) for each in kv.tensors)
    k, v = k.float(), v.float()
    if scales:
        factors = read_scales(scales[0])
        k, v = k * factors[..., :1], v * factors[..., 1:]
    if heads > 1:  # Each row has one head of its pages.
        row = torch.arange(rows, device=query.device)
        own = row % heads * stored_heads // heads
        k, v = (each[row, own][:, None] for each in (k, v))
    logits = cap_logits(query.unflatten(1, (k.shape[1], -1)) @ k.transpose(-1, -2), rule.logit_cap)
    token = torch.arange(num_pages * page_size, device=query.device)
    absent = token >= seq_lens[:, None]
    if rule.window:
        absent |= token < seq_lens[:, None] - rule.window
    logits.masked_fill_(absent[:, None, None], -torch.inf)
    # Values outside of what a row attends may be another request's, even NaN, and 0 * NaN is NaN.
    v.masked_fill_(absent[:, None, :, None], 0.0)
    lse = logits.logsumexp(-1)
    # A row without tokens has lse -inf; its weights have to be 0, not NaN.
    shift = lse.masked_fill(lse == -torch.inf, 0.0)
    out = logits.sub_(shift[..., None]).exp_() @ v
    return out.flatten(1, 2), lse.flatten(1, 2)


def _gather(pages_kv: Tensor, pages: Tensor, rows: int) -> Tensor:
    """``[N, Hs, S, D]`` at ``[R * P]`` -> ``[R, Hs, P * S, D]``."""
    taken = pages_kv.index_select(0, pages).unflatten(0, (rows, -1))
    tokens: Tensor = taken.transpose(1, 2).flatten(2, 3)
    return tokens


def chunk_attention(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    rule: AttentionRule,
    first_key: int = 0,
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.chunk_attention`."""
    query = query.float() * rule.scale
    tokens, num_keys = query.shape[0], k.shape[0]
    out = query.new_empty(*query.shape[:2], v.shape[-1])
    lse = query.new_empty(query.shape[:2])
    keys, values = k.float().permute(1, 2, 0), v.float().transpose(0, 1)
    # By its distance from query 0, as the queries' own positions.
    position = torch.arange(first_key, first_key + num_keys, device=k.device)
    for start in range(0, tokens, _QUERY_BLOCK):
        end = min(start + _QUERY_BLOCK, tokens)
        query_position = torch.arange(start, end, device=k.device)[:, None]
        # Keys that no query of the block attends are left out.
        oldest = max(0, start - rule.window + 1 - first_key) if rule.window else 0
        seen = slice(oldest, end - first_key if causal else num_keys)
        queries = query[start:end].unflatten(1, (k.shape[1], -1)).permute(1, 2, 0, 3)
        logits = cap_logits(queries @ keys[:, None, :, seen], rule.logit_cap)
        if causal:
            logits.masked_fill_(position[seen] > query_position, -torch.inf)
        if rule.window:
            logits.masked_fill_(position[seen] <= query_position - rule.window, -torch.inf)
        block_lse = logits.logsumexp(-1)
        # A query without keys has lse -inf; its weights have to be 0, not NaN.
        shift = block_lse.masked_fill(block_lse == -torch.inf, 0.0)
        block = logits.sub_(shift[..., None]).exp_() @ values[:, None, seen]
        out[start:end] = block.flatten(0, 1).transpose(0, 1)
        lse[start:end] = block_lse.flatten(0, 1).transpose(0, 1)
    return out, lse


def merge_attention(
    out: Tensor,
    lse: Tensor,
    other_out: Tensor | None,
    other_lse: Tensor | None,
    sinks: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See :func:`hisparse.kernels.merge_attention`."""
    if other_out is not None and other_lse is not None:
        merged = torch.logaddexp(lse, other_lse)
        # As above: for two parts without keys, weights have to be 0.
        shift = merged.masked_fill(merged == -torch.inf, 0.0)
        weight, other_weight = ((x - shift).exp_()[..., None] for x in (lse, other_lse))
        out, lse = (out * weight).addcmul_(other_out, other_weight), merged
    if sinks is None:
        return out.to(dtype), lse
    shapes = [(lse.shape, torch.float32), (out.shape, dtype)]
    share, scaled = new_tensors("sinks", shapes, out.device)
    torch.sub(lse, sinks, out=share).sigmoid_()
    return torch.mul(out, share[..., None], out=scaled), lse


def cap_logits(logits: Tensor, cap: float) -> Tensor:
    """``cap * tanh(logits / cap)`` in place; any shape and float dtype; nothing if ``cap`` is 0."""
    return logits.div_(cap).tanh_().mul_(cap) if cap else logits
