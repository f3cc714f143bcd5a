"""Sketches of pages, a few bytes that approximate all keys of a page: checked entry points."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.checks import check_divides, check_once, check_tensor
from hisparse.kernels.dispatch import implementation
from hisparse.kernels.sketch_layout import SketchLayout

__all__ = ["KEY_DTYPES", "SketchLayout", "page_sketch", "sketch_score"]

KEY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def page_sketch(
    keys: Tensor,
    sketches: Tensor,
    host_pages: Tensor,
    layout: SketchLayout,
    *,
    impl: str = "auto",
) -> None:
    """Store the sketch of each page's keys, from which the page is scored.

    Every channel has one value for the page: the mean of its keys or, for the
    ``layout.num_channels`` channels that vary most, the middle of their range. Those channels have
    two bits for each token besides. A page's sketch depends on its keys alone, and all
    implementations give the same bytes.

    Args:
        keys: ``[P, S, Hkv, D]``, one of ``KEY_DTYPES``; any strides.
        sketches: ``[host pages, Hkv, bytes] uint8``, in ``layout``. Written to.
        host_pages: ``[P]`` int32 or int64, entry of ``sketches`` for each page; -1 is skipped. If
            an entry stands twice, either page may win.
        layout: of the bytes.
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape, dtype or device, or a page is beyond the sketches.
    """
    check_once(_check_sketch, keys, sketches, host_pages, values=(layout,))
    module = implementation(impl, keys.device, sketches.device)
    module.page_sketch(keys, sketches, host_pages, layout)


def sketch_score(
    query: Tensor,
    sketches: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    layout: SketchLayout,
    *,
    impl: str = "auto",
) -> Tensor:
    """The log of the sum of e^(q.k) over a page's tokens, with k read from the page's sketch.

    C++ rounds the query and the scales of the detailed channels to whole numbers of 8 bits. That
    moves scores by about a tenth of what the sketch itself is off by.

    Args:
        query: ``[B, Hq, D] float32``, times the softmax scale.
        sketches: ``[host pages, Hkv, bytes] uint8``, from :func:`page_sketch`.
        host_page_table: ``[B, P] int32``.
        num_pages: ``[B] int32``, pages of each request.
        layout: of the bytes.
        impl: "auto", or an implementation's name.

    Returns:
        ``[B, Hq, P] float32``, -inf beyond a request's pages; higher is more attention.

    Raises:
        KernelError: a tensor has another shape, dtype or device, or a page is beyond the sketches.
    """
    check_once(_check_score, query, sketches, host_page_table, num_pages, values=(layout,))
    module = implementation(impl, query.device, sketches.device)
    scores: Tensor = module.sketch_score(query, sketches, host_page_table, num_pages, layout)
    return scores


def _check_sketch(keys: Tensor, sketches: Tensor, host_pages: Tensor, layout: SketchLayout) -> None:
    _check_layout(layout)
    check_tensor("keys", keys, KEY_DTYPES, (None, layout.page_size, None, layout.dim))
    count, _, heads, _ = keys.shape
    check_tensor("sketches", sketches, torch.uint8, (None, heads, layout.num_bytes), keys.device)
    check_tensor("host_pages", host_pages, (torch.int32, torch.int64), (count,), keys.device)


def _check_score(
    query: Tensor,
    sketches: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    layout: SketchLayout,
) -> None:
    _check_layout(layout)
    check_tensor("query", query, torch.float32, (None, None, layout.dim))
    (batch, query_heads, _), device = query.shape, query.device
    check_tensor("sketches", sketches, torch.uint8, (None, None, layout.num_bytes), device)
    check_tensor("host_page_table", host_page_table, torch.int32, (batch, None), device)
    check_tensor("num_pages", num_pages, torch.int32, (batch,), device)
    check_divides("sketches", sketches.shape[1], query_heads)


def _check_layout(layout: SketchLayout) -> None:
    if not 0 <= layout.num_channels <= layout.dim:
        raise KernelError(
            f"layout: got {layout.num_channels} detailed channels, expected 0 to {layout.dim}"
        )
