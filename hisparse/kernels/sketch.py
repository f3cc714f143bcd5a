"""Sketches of pages, a few bytes that approximate all keys of a page: checked entry points."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.checks import check_divides, check_once, check_tensor
from hisparse.kernels.dispatch import implementation
from hisparse.kernels.quantize import QUANTIZED
from hisparse.kernels.sketch_layout import SketchLayout
from hisparse.kernels.tail_pages import TailPages

__all__ = ["KEY_DTYPES", "SketchLayout", "TailPages", "page_sketch", "sketch_score"]

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
        host_pages: ``[P]`` int32 or int64, entry of ``sketches`` for each page; -1 is skipped,
            and a GPU skips 0 too, the padding page. If an entry stands twice, either page may win.
        layout: of the bytes.
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape, dtype or device, or a page is beyond the sketches.
    """
    check_once(_check_sketch, keys, sketches, host_pages, values=(layout,))
    module = implementation(impl, keys.device, sketches.device)
    module.page_sketch(keys, sketches, host_pages, layout)


@overload
def sketch_score(
    query: Tensor,
    sketches: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    layout: SketchLayout,
    *,
    scale: float = 1.0,
    tail: None = None,
    impl: str = "auto",
) -> Tensor: ...


@overload
def sketch_score(
    query: Tensor,
    sketches: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    layout: SketchLayout,
    *,
    scale: float = 1.0,
    tail: TailPages,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]: ...


def sketch_score(
    query: Tensor,
    sketches: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    layout: SketchLayout,
    *,
    scale: float = 1.0,
    tail: TailPages | None = None,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The log of the sum of e^(q.k) over a page's tokens, with k read from the page's sketch.

    C++ rounds the query and the scales of the detailed channels to whole numbers of 8 bits. That
    moves scores by about a tenth of what the sketch itself is off by.

    Args:
        query: ``[B, Hq, D]``, one of ``KEY_DTYPES``; any strides.
        sketches: ``[host pages, Hkv, bytes] uint8``, from :func:`page_sketch`.
        host_page_table: ``[B, P] int32``.
        num_pages: ``[B] int32``, pages of each request.
        layout: of the bytes.
        scale: multiplies q.k, such as the softmax scale.
        tail: the requests' tail pages. None: their log-sum-exp is not wanted.
        impl: "auto", or an implementation's name.

    Returns:
        ``[B, Hq, P] float32``, -inf beyond a request's pages; higher is more attention. With
        ``tail`` also the log-sum-exp of the logits of the tail page's tokens ``[B, Hq] float32``,
        whose keys are exact.

    Raises:
        KernelError: a tensor has another shape, dtype or device, or a page is beyond the sketches.
    """
    check_once(_check_score, query, sketches, host_page_table, num_pages, values=(layout,))
    if tail is not None:
        kv = tail.kv
        heads = sketches.shape[1]
        check_once(_check_tail, query, kv.k, kv.scales, tail.pages, tail.lens, values=(heads,))
    module = implementation(impl, query.device, sketches.device)
    scores, lse = module.sketch_score(
        query, sketches, host_page_table, num_pages, layout, scale, tail
    )
    return scores if tail is None else (scores, lse)


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
    check_tensor("query", query, KEY_DTYPES, (None, None, layout.dim))
    (batch, query_heads, _), device = query.shape, query.device
    check_tensor("sketches", sketches, torch.uint8, (None, None, layout.num_bytes), device)
    check_tensor("host_page_table", host_page_table, torch.int32, (batch, None), device)
    check_tensor("num_pages", num_pages, torch.int32, (batch,), device)
    check_divides("sketches", sketches.shape[1], query_heads)


def _check_tail(
    query: Tensor, k: Tensor, scales: Tensor | None, pages: Tensor, lens: Tensor, kv_heads: int
) -> None:
    device = query.device
    dtypes = KEY_DTYPES if scales is None else QUANTIZED
    check_tensor("tail.kv.k", k, dtypes, (None, None, None, query.shape[2]), device)
    if scales is not None:
        check_tensor("tail.kv.scales", scales, torch.uint8, (*k.shape[:3], 2), device)
    check_tensor("tail.pages", pages, torch.int32, (None,), device)
    check_tensor("tail.lens", lens, torch.int32, pages.shape, device)
    rows, batch, own = pages.shape[0], query.shape[0], k.shape[1]
    heads = rows // batch if batch else 1
    one_row, row_a_head = heads == 1 and own == kv_heads, heads % kv_heads == 0 and own == 1
    if rows != heads * batch or not (one_row or row_a_head):
        raise KernelError(
            f"tail.pages: got {rows} pages of {own} heads, expected {batch} pages of {kv_heads} "
            f"heads, or a multiple of {batch * kv_heads} pages of one head"
        )


def _check_layout(layout: SketchLayout) -> None:
    if not 0 <= layout.num_channels <= layout.dim:
        raise KernelError(
            f"layout: got {layout.num_channels} detailed channels, expected 0 to {layout.dim}"
        )
