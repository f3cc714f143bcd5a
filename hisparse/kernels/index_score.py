"""Scores of tokens by a model's own indexer: checked entry points."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.checks import check_contiguous, check_once, check_tensor
from hisparse.kernels.dispatch import implementation
from hisparse.types import IndexerInputs

__all__ = ["index_score", "store_index_keys"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_KEY_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def index_score(
    new: IndexerInputs,
    keys: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    *,
    scales: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """DeepSeek-V3.2's index scores of all tokens, ``sum_h weights_h * relu(queries_h . key)``.

    https://arxiv.org/abs/2512.02556, equation 1. Pages have one token. The last token is the new
    one, whose key is not stored yet.

    Args:
        new: inputs of one new token for each of B requests: ``queries [B, Hi, Di]``,
            ``keys [B, Di]`` and ``weights [B, Hi]``, float32, bfloat16 or float16.
        keys: ``[host pages, Di]`` float32, bfloat16 or float8_e4m3fn, from
            :func:`store_index_keys`.
        host_page_table: ``[B, P] int32``.
        num_pages: ``[B] int32``, tokens of each request before the new one; less than P.
        scales: ``[host pages] float32``, factors of the keys. float8_e4m3fn needs them, the other
            dtypes have none.
        impl: "auto", or an implementation's name.

    Returns:
        ``[B, 1, P] float32``, higher is kept; the new token's score at ``num_pages``, anything
        behind it.

    Raises:
        KernelError: a tensor has another shape, dtype or device.
    """
    check_once(_check_score, *new, keys, host_page_table, num_pages, scales)
    module = implementation(impl, new.queries.device, keys.device)
    scores: Tensor = module.index_score(new, keys, host_page_table, num_pages, scales)
    return scores


def store_index_keys(
    new: Tensor,
    keys: Tensor,
    host_pages: Tensor,
    *,
    scales: Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Store keys of a model's own indexer; in eight bits, each has a power of two as scale.

    Args:
        new: ``[T, Di]`` float32, bfloat16 or float16.
        keys: ``[host pages, Di]`` float32, bfloat16 or float8_e4m3fn. Written to.
        host_pages: ``[T]`` int32 or int64, entry of ``keys`` for each token. A GPU skips 0, the
            padding page. If an entry stands twice, either token may win.
        scales: ``[host pages] float32``, contiguous, factors of the keys. Written to.
            float8_e4m3fn needs them, the other dtypes have none.
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape, dtype or device, or the scales are not contiguous.
    """
    check_once(_check_store, new, keys, host_pages, scales)
    if scales is not None:
        check_contiguous("scales", scales)
    module = implementation(impl, new.device, keys.device)
    module.store_index_keys(new, keys, host_pages, scales)


def _check_score(
    queries: Tensor,
    new_keys: Tensor,
    weights: Tensor,
    keys: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    scales: Tensor | None,
) -> None:
    check_tensor("new.queries", queries, _FLOATS, (None, None, None))
    (batch, heads, dim), device = queries.shape, queries.device
    check_tensor("new.keys", new_keys, _FLOATS, (batch, dim), device)
    check_tensor("new.weights", weights, _FLOATS, (batch, heads), device)
    _check_keys(keys, scales, dim, device)
    check_tensor("host_page_table", host_page_table, torch.int32, (batch, None), device)
    check_tensor("num_pages", num_pages, torch.int32, (batch,), device)


def _check_store(new: Tensor, keys: Tensor, host_pages: Tensor, scales: Tensor | None) -> None:
    check_tensor("new", new, _FLOATS, (None, None))
    _check_keys(keys, scales, new.shape[1], new.device)
    indices = (torch.int32, torch.int64)
    check_tensor("host_pages", host_pages, indices, (new.shape[0],), new.device)


def _check_keys(keys: Tensor, scales: Tensor | None, dim: int, device: torch.device) -> None:
    check_tensor("keys", keys, _KEY_DTYPES, (None, dim), device)
    needs_scales = keys.dtype == torch.float8_e4m3fn
    if needs_scales != (scales is not None):
        got, expected = ("None", "them") if needs_scales else ("them", "None")
        raise KernelError(f"scales: got {got}, expected {expected} for {keys.dtype}")
    if scales is not None:
        check_tensor("scales", scales, torch.float32, (keys.shape[0],), device)
