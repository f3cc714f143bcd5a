"""Channel-wise ranges of the keys of pages: checked entry point."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.checks import check_contiguous, check_once, check_tensor
from hisparse.kernels.dispatch import implementation

__all__ = ["SUMMARY_DTYPES", "page_summary"]

SUMMARY_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
_KEY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
        summaries: ``[host pages, ranges, Hkv, 2D]``, one of ``SUMMARY_DTYPES``; maxima, then
            minima. Written to.
        host_pages: ``[P]`` int32 or int64, entry of ``summaries`` for each page. -1 is skipped, and
            a GPU skips 0 too, the padding page. If an entry stands twice, either page may win.
        scales: ``[host pages, ranges, Hkv] float32``, contiguous, factors of the summaries. Written
            to. float8_e4m3fn needs them, the other dtypes have none.
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape, dtype or device, the scales are not contiguous, or
            a page is beyond the summaries.
    """
    check_once(_check, keys, summaries, host_pages, scales)
    if scales is not None:
        check_contiguous("scales", scales)
    module = implementation(impl, keys.device, summaries.device)
    module.page_summary(keys, summaries, host_pages, scales)


def _check(keys: Tensor, summaries: Tensor, host_pages: Tensor, scales: Tensor | None) -> None:
    check_tensor("keys", keys, _KEY_DTYPES, (None, None, None, None))
    count, size, heads, dim = keys.shape
    check_tensor("summaries", summaries, SUMMARY_DTYPES, (None, None, heads, 2 * dim), keys.device)
    ranges = summaries.shape[1]
    if ranges == 0 or size % ranges:
        raise KernelError(f"summaries: got {ranges} ranges, expected a divisor of {size} tokens")
    needs_scales = summaries.dtype == torch.float8_e4m3fn
    if needs_scales != (scales is not None):
        got, expected = ("None", "them") if needs_scales else ("them", "None")
        raise KernelError(f"scales: got {got}, expected {expected} for {summaries.dtype}")
    if scales is not None:
        check_tensor("scales", scales, torch.float32, tuple(summaries.shape[:3]), keys.device)
    check_tensor("host_pages", host_pages, (torch.int32, torch.int64), (count,), keys.device)
