"""Exact logits of pages whose keys lie in host memory: checked entry point."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.checks import check_divides, check_once, check_tensor
from hisparse.kernels.dispatch import implementation

__all__ = ["KEY_DTYPES", "check_key_inputs", "key_score"]

KEY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CPU = torch.device("cpu")


def key_score(
    query: Tensor,
    keys: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    *,
    reduce: Literal["max", "lse"] = "max",
    logit_cap: float = 0.0,
    pages: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Score pages by their exact q.k, from keys where they lie in host memory.

    A page's score depends on nothing but its keys and the query: fewer ``pages`` change no bit of
    the others' scores. CPU only.

    Args:
        query: ``[B, Hq, D] float32``, times the softmax scale.
        keys: ``[host pages, Hkv, S, D]``, one of ``KEY_DTYPES``; any strides, but D dense.
        host_page_table: ``[B, P] int32``.
        num_pages: ``[B] int32``, pages of each request.
        reduce: how a page's S products become its score: "max", the largest, or "lse",
            log-sum-exp.
        logit_cap: the products are capped at first, as in attention with this cap; 0: none.
        pages: ``[B, Hq, P] bool``, pages to score; None: all.
        impl: "auto", or an implementation's name.

    Returns:
        ``[B, Hq, P] float32``, -inf beyond a request's pages and for pages that are not scored.

    Raises:
        KernelError: a tensor has another shape, dtype or device, or a page is not in the pool.
    """
    check_key_inputs(query, keys, host_page_table, num_pages)
    if pages is not None:
        shape = (*query.shape[:2], host_page_table.shape[1])
        check_tensor("pages", pages, torch.bool, shape, _CPU)
    if reduce not in ("max", "lse"):
        raise KernelError(f"reduce: got {reduce!r}, expected max or lse")
    module = implementation(impl, query.device, keys.device)
    scores: Tensor = module.key_score(
        query, keys, host_page_table, num_pages, pages, reduce, logit_cap
    )
    return scores


def check_key_inputs(
    query: Tensor, keys: Tensor, host_page_table: Tensor, num_pages: Tensor
) -> None:
    """Check the inputs of a kernel that reads keys in host memory, see :func:`key_score`."""
    check_once(_check_inputs, query, keys, host_page_table, num_pages)
    if keys.stride(-1) != 1:
        raise KernelError(f"keys: got stride {keys.stride(-1)} in D, expected 1")


def _check_inputs(query: Tensor, keys: Tensor, host_page_table: Tensor, num_pages: Tensor) -> None:
    check_tensor("query", query, torch.float32, (None, None, None), _CPU)
    batch, query_heads, dim = query.shape
    check_tensor("keys", keys, KEY_DTYPES, (None, None, None, dim), _CPU)
    check_tensor("host_page_table", host_page_table, torch.int32, (batch, None), _CPU)
    check_tensor("num_pages", num_pages, torch.int32, (batch,), _CPU)
    check_divides("keys", keys.shape[1], query_heads)
