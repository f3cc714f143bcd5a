"""Channel-wise ranges of the keys of pages, and scores by them (Quest)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.arguments import FLOATS, Arg, Result, check_divides
from hisparse.kernels.operation import Operation
from hisparse.kernels.quantize.op import check_scales

__all__ = ["page_score", "page_summary"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)


def _ranges_fit(tensors: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    ranges, size = sizes["ranges"], sizes["S"]
    if ranges == 0 or size % ranges:
        raise KernelError(f"summaries: got {ranges} ranges, expected a divisor of {size} tokens")
    check_scales("scales", tensors["summaries"], tensors["scales"])


PAGE_SUMMARY = Operation(
    __name__,
    "page_summary",
    Arg("keys", "N S! Hkv D", *FLOATS),
    Arg("summaries", "pages ranges Hkv 2*D", *_DTYPES, written=True, layout="all"),
    Arg("host_pages", "N", torch.int32, torch.int64),
    Arg("scales", "pages ranges Hkv", torch.float32, optional=True, written=True, layout="all"),
    cpu=True,
    also=_ranges_fit,
)
PAGE_SCORE = Operation(
    __name__,
    "page_score",
    Arg("query", "B Hq D", *FLOATS, layout="all"),
    Arg("summaries", "pages! ranges! Hkv 2*D", *_DTYPES, layout="all"),
    Arg("host_page_table", "B P", torch.int32),
    Arg("num_pages", "B", torch.int32, layout="all"),
    Arg("scales", "pages ranges Hkv", torch.float32, optional=True, layout="all"),
    results=(Result(torch.float32, "B Hq P"),),
    cpu=True,
    also=lambda tensors, sizes: check_divides("summaries", sizes["Hkv"], sizes["Hq"]),
)


def page_summary(
    keys: Tensor,
    summaries: Tensor,
    host_pages: Tensor,
    *,
    scales: Tensor | None = None,
    impl: str = "auto",
) -> None:
    """Store the maxima and minima of the keys in each of a page's ranges, consecutive tokens.

    They bound every q.k in the range: Quest's page metadata; https://arxiv.org/abs/2406.10774,
    section 3.3. Where the summaries' dtype cannot hold a value, a maximum is rounded up and a
    minimum down, so that the bound still holds. float8_e4m3fn is scaled by a power of two.

    Args:
        keys: ``[P, S, Hkv, D]`` float32, bfloat16 or float16; any strides. The ranges divide S.
        summaries: ``[host pages, ranges, Hkv, 2D]``, float32, bfloat16 or float8_e4m3fn,
            contiguous; maxima, then minima. Written to.
        host_pages: ``[P]`` int32 or int64, entry of ``summaries`` for each page. -1 is skipped, and
            a GPU skips 0 too, the padding page. If an entry stands twice, either page may win.
        scales: ``[host pages, ranges, Hkv] float32``, contiguous, factors of the summaries. Written
            to. float8_e4m3fn needs them, the other dtypes have none.
    """
    run = PAGE_SUMMARY(impl, keys, summaries, host_pages, scales)
    run(keys, summaries, host_pages, scales)


def page_score(
    query: Tensor,
    summaries: Tensor,
    host_page_table: Tensor,
    num_pages: Tensor,
    *,
    scales: Tensor | None = None,
    scale: float = 1.0,
    impl: str = "auto",
) -> Tensor:
    """Quest's criticality: the largest q.k that a page's key ranges allow.

    A range allows ``sum_d max(q_d * high_d, q_d * low_d)``; https://arxiv.org/abs/2406.10774,
    section 3.3. A page allows the largest of its ranges.

    Args:
        query: ``[B, Hq, D]`` float32, bfloat16 or float16; any strides.
        summaries: ``[host pages, ranges, Hkv, 2D]``, float32, bfloat16 or float8_e4m3fn; for each
            range the channel-wise maxima of its keys, then their minima.
        host_page_table: ``[B, P] int32``.
        num_pages: ``[B] int32``, pages of each request.
        scales: ``[host pages, ranges, Hkv] float32``, positive factors of the summaries. None: 1.
        scale: multiplies the scores; positive, such as the softmax scale.

    Returns:
        ``[B, Hq, P] float32``, higher is more critical; scores from ``num_pages`` on mean nothing.
    """
    tensors = (query, summaries, host_page_table, num_pages, scales)
    scores: Tensor = PAGE_SCORE(impl, *tensors)(*tensors, scale)
    return scores
