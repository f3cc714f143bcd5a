"""Scores of tokens by a model's own indexer in plain PyTorch, which a CPU runs as well."""

import torch
from torch import Tensor

from hisparse.kernels.summary.reference import exponent_within_448, stored_pages
from hisparse.types import IndexerInputs

#: Products q.k per block, over all heads of the indexer: a block fits the processor's cache.
_BLOCK = 2**18


def index_score(
    new: IndexerInputs,
    keys: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    scales: Tensor | None,
) -> Tensor:
    """See :func:`hisparse.kernels.index_score`."""
    scores = _scores(new, keys, host_page_table, scales)
    products = (new.queries.float() @ new.keys.float()[..., None]).relu_()[..., 0]
    new_scores = (new.weights.float() * products).sum(-1)
    return scores.scatter_(2, num_pages.long()[:, None, None], new_scores[:, None, None])


def chunk_index_score(
    new: IndexerInputs,
    keys: Tensor,
    host_page_table: Tensor,
    num_tokens: Tensor,
    scales: Tensor | None,
) -> Tensor:
    """See :func:`hisparse.kernels.chunk_index_score`."""
    return _scores(new, keys, host_page_table[None], scales).movedim(1, 0)


def _scores(
    new: IndexerInputs, keys: Tensor, host_page_table: Tensor, scales: Tensor | None
) -> Tensor:
    """Score the stored keys at ``host_page_table [N, P]`` for ``new``, inputs of N * T tokens.

    Args:
        new: queries and weights of the tokens, those of a row side by side.
        keys: ``[host pages, Di]``, see :func:`hisparse.kernels.index_score`.
        host_page_table: ``[N, P] int32``.
        scales: ``[host pages] float32``; None: 1.

    Returns:
        ``[N, T, P] float32``.
    """
    table, width = host_page_table, host_page_table.shape[1]
    queries, weights = (
        x.float().unflatten(0, (len(table), -1)) for x in (new.queries, new.weights)
    )
    scores: Tensor = queries.new_empty(*queries.shape[:2], width)
    block = max(1, _BLOCK // queries[..., 0].numel())
    for start in range(0, width, block):
        part = slice(start, start + block)
        pages = table[:, part]
        page_keys = stored_to_float(keys.index_select(0, pages.flatten())).unflatten(0, pages.shape)
        products = (queries.flatten(1, 2) @ page_keys.mT).relu_().unflatten(1, weights.shape[1:])
        scores[..., part] = (weights[:, :, None] @ products)[:, :, 0]
    if scales is not None:
        scores *= scales[table.long()][:, None]
    return scores


def store_index_keys(new: Tensor, keys: Tensor, host_pages: Tensor, scales: Tensor | None) -> None:
    """See :func:`hisparse.kernels.store_index_keys`."""
    token, page = stored_pages(host_pages)
    new = new[token].float()
    if scales is not None:
        largest = new.abs().amax(-1).clamp_(min=1e-4)
        # Dividing by a power of two is exact.
        scale = (exponent_within_448(largest) << 23).view(torch.float32)
        scales[page] = scale
        new = new / scale[:, None]
    keys[page] = new.to(keys.dtype)


def stored_to_float(keys: Tensor) -> Tensor:
    """Convert stored keys to float32, exactly.

    A half has the bits of the e4m3 number, with an exponent bias that is larger by 8. PyTorch's
    own conversion takes four times as long on a CPU.
    """
    if keys.dtype != torch.float8_e4m3fn or keys.device.type != "cpu":
        return keys.float()
    bits = keys.view(torch.uint8).to(torch.int16)
    halves = (bits << 8 & -0x8000) | (bits << 7 & 0x3F80)
    return halves.view(torch.float16).float().mul_(2**8)
