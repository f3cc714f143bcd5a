"""Channel-wise ranges of the keys of pages: checked entry point."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.kernels.checks import check_once, check_tensor
from hisparse.kernels.dispatch import implementation

__all__ = ["SUMMARY_DTYPES", "page_summary"]

SUMMARY_DTYPES = (torch.float32, torch.bfloat16)
_KEY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def page_summary(
    keys: Tensor, summaries: Tensor, host_pages: Tensor, *, impl: str = "auto"
) -> None:
    """Store the maxima and minima of each page's keys, which bound every q.k in the page.

    Quest's page metadata; https://arxiv.org/abs/2406.10774, section 3.3. Where the summaries' dtype
    cannot hold a value, a maximum is rounded up and a minimum down, so that the bound still holds.

    Args:
        keys: ``[P, S, Hkv, D]`` float32, bfloat16 or float16; any strides.
        summaries: ``[host pages, Hkv, 2D]``, one of ``SUMMARY_DTYPES``; maxima, then minima.
            Written to.
        host_pages: ``[P]`` int32 or int64, entry of ``summaries`` for each page; -1 is skipped. If
            an entry stands twice, either page may win.
        impl: "auto", or an implementation's name.

    Raises:
        KernelError: a tensor has another shape, dtype or device, or a page is beyond the
            summaries.
    """
    check_once(_check, keys, summaries, host_pages)
    module = implementation(impl, keys.device, summaries.device)
    module.page_summary(keys, summaries, host_pages)


def _check(keys: Tensor, summaries: Tensor, host_pages: Tensor) -> None:
    check_tensor("keys", keys, _KEY_DTYPES, (None, None, None, None))
    count, _, heads, dim = keys.shape
    check_tensor("summaries", summaries, SUMMARY_DTYPES, (None, heads, 2 * dim), keys.device)
    check_tensor("host_pages", host_pages, (torch.int32, torch.int64), (count,), keys.device)
