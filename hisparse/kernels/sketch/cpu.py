"""Sketches and outlines in C++: the reference's bytes, and scores summed in another order."""

from __future__ import annotations

from torch import Tensor

from hisparse.kernels.attention.cpu import paged_attention
from hisparse.kernels.attention.op import scaled_query
from hisparse.kernels.sketch.op import (
    OUTLINE_SCORE,
    PAGE_SKETCH,
    SKETCH_SCORE,
    SketchLayout,
    TailPages,
    tail_lse,
)

__all__ = ["outline_score", "page_sketch", "sketch_score"]


def page_sketch(keys: Tensor, sketches: Tensor, host_pages: Tensor, layout: SketchLayout) -> None:
    """See :func:`hisparse.kernels.page_sketch`."""
    PAGE_SKETCH.on_cpu(keys, sketches, host_pages, more=(layout.num_channels,))


def sketch_score(
    query: Tensor,
    sketches: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    tail: TailPages | None,
    layout: SketchLayout,
    scale: float,
) -> tuple[Tensor, Tensor | None]:
    """See :func:`hisparse.kernels.sketch_score`."""
    query = scaled_query(query, scale)
    (scores,) = SKETCH_SCORE.on_cpu(query, sketches, host_page_table, num_pages, more=layout)
    return scores, None if tail is None else tail_lse(query, tail, paged_attention)


def outline_score(
    query: Tensor, outlines: Tensor, host_page_table: Tensor, num_pages: Tensor
) -> Tensor:
    """See :func:`hisparse.kernels.outline_score`."""
    return OUTLINE_SCORE.on_cpu(query, outlines, host_page_table, num_pages)[0]
