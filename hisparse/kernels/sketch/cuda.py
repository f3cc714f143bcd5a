"""Scores of sketches on CUDA devices, and the log-sum-exp of tail pages in the same launch."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.build.cuda import call_cuda
from hisparse.kernels.sketch.op import SKETCH_SCORE, SketchLayout, TailPages


def sketch_score(
    query: Tensor,
    sketches: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    tail: TailPages | None,
    layout: SketchLayout,
    scale: float,
) -> tuple[Tensor, Tensor | None]:
    """See :func:`hisparse.kernels.sketch_score`.

    Products of a query's channel and a detailed channel's scale are rounded to 11 bits.
    """
    batch, q_heads, _ = query.shape
    scores = query.new_empty((batch, q_heads, host_page_table.shape[1]), dtype=torch.float32)
    lse = None if tail is None else scores.new_empty((batch, q_heads))
    kv = (None, None) if tail is None else (tail.kv.k, tail.kv.scales)
    tails = (None, None) if tail is None else (tail.pages, tail.lens)
    given = (query, sketches, host_page_table, num_pages, *kv, *tails)
    call_cuda("sketch_score", *SKETCH_SCORE.native(given), scores, lse, *map(int, layout), scale)
    return scores, lse
