"""PyTorch versions of the Triton kernels in SGLang's page allocator.

SGLang before 0.5.22 has only the Triton kernels, which do not run on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["allocate_slots", "replace_triton_kernels"]


def replace_triton_kernels(paged: Any) -> None:
    """Replace the two Triton kernels of SGLang's page allocator by PyTorch functions.

    Args:
        paged: the module ``sglang.srt.mem_cache.allocator.paged``.
    """
    paged.alloc_extend_kernel = _KernelLauncher(_extend)
    paged.alloc_decode_kernel = _KernelLauncher(_decode)


class _KernelLauncher:
    """Makes a function callable as a Triton kernel: ``kernel[grid](...)``. Ignores the grid."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._function


def _extend(
    prefix_lens: Tensor,
    seq_lens: Tensor,
    last_loc: Tensor,
    free_pages: Tensor,
    out: Tensor,
    _: int,
    page_size: int,
) -> None:
    allocate_slots(prefix_lens, seq_lens, last_loc, free_pages, out, page_size)


def _decode(
    seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, out: Tensor, _: int, page_size: int
) -> None:
    allocate_slots(seq_lens - 1, seq_lens, last_loc, free_pages, out, page_size)


def allocate_slots(
    prefix_lens: Tensor,
    seq_lens: Tensor,
    last_loc: Tensor,
    free_pages: Tensor,
    out: Tensor,
    page_size: int,
) -> None:
    """Assign host slots to new tokens.

    New tokens first fill the rest of their request's last page, then free pages in order.

    Args:
        prefix_lens: ``[B]``, tokens of each request before the allocation.
        seq_lens: ``[B]``, tokens of each request after the allocation.
        last_loc: ``[B]``, host slot of each request's last token.
        free_pages: ``[N]``. If N is too small, ``out`` is invalid, as with SGLang's kernels.
        out: ``[sum(seq_lens - prefix_lens)] int64``, host slots, written.
        page_size: tokens per page of SGLang.
    """
    lengths = seq_lens - prefix_lens
    request = torch.repeat_interleave(lengths)
    nth = torch.arange(len(out), device=out.device) - (lengths.cumsum(0) - lengths)[request]
    position = nth + prefix_lens[request]
    old_pages = -(-prefix_lens // page_size)
    new_pages = -(-seq_lens // page_size) - old_pages
    nth_page = (new_pages.cumsum(0) - new_pages - old_pages)[request] + position // page_size
    pages = torch.cat((free_pages, free_pages.new_zeros(1)))
    in_new = pages[nth_page.clamp(0, len(free_pages))] * page_size + position % page_size
    in_old = last_loc[request] + 1 + nth
    out.copy_(torch.where(position < (old_pages * page_size)[request], in_old, in_new))
