"""Outlines of pages, half a byte a channel, from which a few pages are chosen for a closer look."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.checks import check_divides, check_once, check_tensor
from hisparse.kernels.dispatch import implementation
from hisparse.kernels.sketch_layout import BLOCK

__all__ = ["outline_bytes", "outline_score"]


def outline_bytes(dim: int) -> int:
    """Bytes of the outline of a page and KV head with keys of width ``dim``.

    - ``codes [half] uint8``, half the width rounded up to whole blocks of 8 channels: byte i has
      channel i in its low four bits, and channel half + i in its high ones. Four bits are a signed
      number v, -7 to 7, and stand for ``1.4 * v * (abs(v) + 6)`` times the scale of the block: the
      steps grow with the value, since most blocks have a channel that is far above the others;
    - ``block scales [ceil(D / 8)] uint8``, those of the page's sketch.
    """
    return -(-dim // (2 * BLOCK)) * BLOCK - (-dim // BLOCK)


def outline_score(
    query: Tensor,
    outlines: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    *,
    impl: str = "auto",
) -> Tensor:
    """q.k of every page, with one k for all tokens of the page, read from its outline.

    Args:
        query: ``[B, Hq, D] float32``, times the softmax scale.
        outlines: ``[host pages, Hkv, bytes] uint8``, see :func:`outline_bytes`.
        host_page_table: ``[B, P] int32``.
        num_pages: ``[B] int32``, pages of each request.
        impl: "auto", or an implementation's name.

    Returns:
        ``[B, Hq, P] float32``, -inf beyond a request's pages.

    Raises:
        KernelError: a tensor has another shape, dtype or device, or a page is beyond the outlines.
    """
    check_once(_check, query, outlines, host_page_table, num_pages)
    module = implementation(impl, query.device, outlines.device)
    scores: Tensor = module.outline_score(query, outlines, host_page_table, num_pages)
    return scores


def _check(query: Tensor, outlines: Tensor, host_page_table: Tensor, num_pages: Tensor) -> None:
    check_tensor("query", query, torch.float32, (None, None, None))
    (batch, query_heads, dim), device = query.shape, query.device
    check_tensor("outlines", outlines, torch.uint8, (None, None, outline_bytes(dim)), device)
    check_tensor("host_page_table", host_page_table, torch.int32, (batch, None), device)
    check_tensor("num_pages", num_pages, torch.int32, (batch,), device)
    check_divides("outlines", outlines.shape[1], query_heads)
