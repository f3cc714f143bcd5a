"""Sketches of pages, bytes that stand for all of a page's keys: checked entry points."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.checks import check_tensor
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
    """Store what stands for each page's keys when they are scored.

    Every channel has one value for the page: its mean or, where it varies most, the middle of its
    range. These ``layout.num_channels`` channels have two bits for each token on top of it. A
    page's sketch depends on its keys alone, and is the same in all implementations, bit for bit.

    Args:
        keys: ``[P, S, Hkv, D]``, float32, bfloat16 or float16; any strides.
        sketches: ``[host pages, Hkv, bytes] uint8``, as ``layout`` says.
        host_pages: ``[P]`` int32 or int64, where page p's sketch goes; -1 is left out, and where a
            page stands twice either may win.
        layout: of the bytes.
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape or dtype, or a page is beyond the sketches.
    """
    _check_layout(layout)
    shape = (None, layout.page_size, None, layout.dim)
    check_tensor("keys", keys, keys.dtype, shape)
    if keys.dtype not in KEY_DTYPES:
        choices = ", ".join(map(str, KEY_DTYPES))
        raise KernelError(f"keys: got dtype {keys.dtype}, expected one of {choices}")
    count, _, heads, _ = keys.shape
    wanted = (None, heads, layout.num_bytes)
    check_tensor("sketches", sketches, torch.uint8, wanted, keys.device)
    if host_pages.dtype not in (torch.int32, torch.int64):
        raise KernelError(f"host_pages: got dtype {host_pages.dtype}, expected int32 or int64")
    check_tensor("host_pages", host_pages, host_pages.dtype, (count,), keys.device)
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
    """The log of the sum over a page's tokens of e^(q.k), with the keys that the sketch stands for.

    Args:
        query: ``[B, Hq, D] float32``, times the softmax scale.
        sketches: ``[host pages, Hkv, bytes] uint8``, as :func:`page_sketch` stores them.
        host_page_table: ``[B, P] int32``.
        num_pages: ``[B] int32``, pages that a request has.
        layout: of the bytes.
        impl: "auto", or an implementation's name.

    Returns:
        ``[B, Hq, P] float32``, -inf where there is no page; higher is more attention.

    Raises:
        KernelError: a tensor has another shape or dtype, or a page is beyond the sketches.
    """
    _check_layout(layout)
    check_tensor("query", query, torch.float32, (None, None, layout.dim))
    batch, q_heads, _ = query.shape
    wanted = (None, None, layout.num_bytes)
    check_tensor("sketches", sketches, torch.uint8, wanted, query.device)
    check_tensor("host_page_table", host_page_table, torch.int32, (batch, None), query.device)
    check_tensor("num_pages", num_pages, torch.int32, (batch,), query.device)
    if q_heads % sketches.shape[1]:
        raise KernelError(
            f"sketches: got {sketches.shape[1]} heads, expected a divisor of the {q_heads} "
            "query heads"
        )
    module = implementation(impl, query.device, sketches.device)
    scores: Tensor = module.sketch_score(query, sketches, host_page_table, num_pages, layout)
    return scores


def _check_layout(layout: SketchLayout) -> None:
    if not 0 <= layout.num_channels <= layout.dim:
        raise KernelError(
            f"layout: got {layout.num_channels} detailed channels, expected 0 to {layout.dim}"
        )
