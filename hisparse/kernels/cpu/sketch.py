"""Sketches of pages in C++; the reference's bytes, and scores summed in another order."""

from __future__ import annotations

from torch import Tensor

from hisparse.kernels.build.cpu import call_cpu, dense_rows
from hisparse.kernels.cpu.attention import paged_attention
from hisparse.kernels.reference.query import scaled_query
from hisparse.kernels.reference.sketch import tail_lse
from hisparse.kernels.sketch_layout import SketchLayout
from hisparse.kernels.tail_pages import TailPages

__all__ = ["page_sketch", "sketch_score"]


def page_sketch(keys: Tensor, sketches: Tensor, host_pages: Tensor, layout: SketchLayout) -> None:
    """See :func:`hisparse.kernels.page_sketch`."""
    keys, host_pages = dense_rows(keys), dense_rows(host_pages)
    call_cpu("page_sketch", keys, sketches, host_pages, layout.num_channels)


def sketch_score(
    query: Tensor,
    sketches: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    layout: SketchLayout,
    scale: float,
    tail: TailPages | None,
) -> tuple[Tensor, Tensor | None]:
    """See :func:`hisparse.kernels.sketch_score`."""
    query = scaled_query(query, scale)
    scores = query.new_empty(*query.shape[:2], host_page_table.shape[1])
    call_cpu(
        "sketch_score",
        query.contiguous(),
        sketches,
        dense_rows(host_page_table),
        num_pages.contiguous(),
        scores,
        *layout,
    )
    return scores, None if tail is None else tail_lse(query, tail, paged_attention)
