"""Channel-wise ranges of the keys of pages: checked entry point."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.checks import check_tensor
from hisparse.kernels.dispatch import implementation

__all__ = ["SUMMARY_DTYPES", "page_summary"]

SUMMARY_DTYPES = (torch.float32, torch.bfloat16)


def page_summary(
    keys: Tensor, summaries: Tensor, host_pages: Tensor, *, impl: str = "auto"
) -> None:
    """Store the maxima and minima of each page's keys, which bound every q.k in the page.

    What Quest keeps of a page; https://arxiv.org/abs/2406.10774, section 3.3. A maximum that the
    summaries' dtype cannot hold is rounded up and a minimum down, so that the bound stays one.

    Args:
        keys: ``[P, S, Hkv, D]``, any strides.
        summaries: ``[host pages, Hkv, 2D]``, one of ``SUMMARY_DTYPES``; maxima, then minima.
        host_pages: ``[P]`` int32 or int64, where page p's summary goes; -1 is left out, and where a
            page stands twice either may win.
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape or dtype, or a page is beyond the summaries.
    """
    check_tensor("keys", keys, keys.dtype, (None, None, None, None))
    count, _, heads, dim = keys.shape
    if summaries.dtype not in SUMMARY_DTYPES:
        choices = " or ".join(map(str, SUMMARY_DTYPES))
        raise KernelError(f"summaries: got dtype {summaries.dtype}, expected {choices}")
    check_tensor("summaries", summaries, summaries.dtype, (None, heads, 2 * dim), keys.device)
    if host_pages.dtype not in (torch.int32, torch.int64):
        raise KernelError(f"host_pages: got dtype {host_pages.dtype}, expected int32 or int64")
    check_tensor("host_pages", host_pages, host_pages.dtype, (count,), keys.device)
    module = implementation(impl, keys.device, summaries.device)
    module.page_summary(keys, summaries, host_pages)
