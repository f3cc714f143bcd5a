"""Exact logits of pages whose keys lie in host memory: checked entry point."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.checks import check_tensor
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
    pages: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """What q.k comes to in each page, exactly, from keys where they lie in host memory.

    A page's score depends on nothing but its keys and the query: asking for fewer pages changes
    no bit of the others. On the CPU only.

    Args:
        query: ``[B, Hq, D] float32``, times the softmax scale.
        keys: ``[host pages, Hkv, S, D]``, one of ``KEY_DTYPES``; any strides, but D dense.
        host_page_table: ``[B, P] int32``.
        num_pages: ``[B] int32``, pages that a request has.
        reduce: what becomes of a page's S products: "max", the largest, or "lse", log-sum-exp.
        pages: ``[B, Hq, P] bool``, which ones are scored; None: all.
        impl: "auto", or an implementation's name.

    Returns:
        ``[B, Hq, P] float32``, -inf where there is no page or it is not scored.

    Raises:
        KernelError: a tensor has another shape, dtype or device, or a page is not in the pool.
    """
    check_key_inputs(query, keys, host_page_table, num_pages)
    if pages is not None:
        check_tensor("pages", pages, torch.bool, (*query.shape[:2], host_page_table.shape[1]))
    if reduce not in ("max", "lse"):
        raise KernelError(f"reduce: got {reduce!r}, expected max or lse")
    module = implementation(impl, query.device, keys.device)
    scores: Tensor = module.key_score(query, keys, host_page_table, num_pages, pages, reduce)
    return scores


def check_key_inputs(
    query: Tensor, keys: Tensor, host_page_table: Tensor, num_pages: Tensor
) -> None:
    """What all kernels need that score pages by keys in host memory, see :func:`key_score`."""
    batch, q_heads, dim = query.shape
    check_tensor("query", query, torch.float32, (None, None, None), _CPU)
    if keys.dtype not in KEY_DTYPES:
        choices = ", ".join(map(str, KEY_DTYPES))
        raise KernelError(f"keys: got dtype {keys.dtype}, expected one of {choices}")
    check_tensor("keys", keys, keys.dtype, (None, None, None, dim), _CPU)
    if keys.stride(-1) != 1:
        raise KernelError(f"keys: got stride {keys.stride(-1)} in D, expected 1")
    check_tensor("host_page_table", host_page_table, torch.int32, (batch, None))
    check_tensor("num_pages", num_pages, torch.int32, (batch,))
    if q_heads % keys.shape[1]:
        raise KernelError(
            f"keys: got {keys.shape[1]} heads, expected a divisor of the {q_heads} query heads"
        )
