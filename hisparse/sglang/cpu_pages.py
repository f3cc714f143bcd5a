"""Host slots for new tokens where SGLang's allocator knows only Triton: a CPU before 0.5.22."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["hand_out", "replace_triton"]


def replace_triton(paged: Any) -> None:
    """Let SGLang's module ``paged`` hand out pages with PyTorch.

    Args:
        paged: ``sglang.srt.mem_cache.allocator.paged``, whose two kernels are replaced.
    """
    paged.alloc_extend_kernel = _Launch(_extend)
    paged.alloc_decode_kernel = _Launch(_decode)


class _Launch:
    """``kernel[grid](...)``."""

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
    hand_out(prefix_lens, seq_lens, last_loc, free_pages, out, page_size)


def _decode(
    seq_lens: Tensor, last_loc: Tensor, free_pages: Tensor, out: Tensor, _: int, page_size: int
) -> None:
    hand_out(seq_lens - 1, seq_lens, last_loc, free_pages, out, page_size)


def hand_out(
    prefix_lens: Tensor,
    seq_lens: Tensor,
    last_loc: Tensor,
    free_pages: Tensor,
    out: Tensor,
    page_size: int,
) -> None:
    """Slots of new tokens: first what is left of a request's last page, then free pages in order.

    Args:
        prefix_lens: ``[B]``, tokens that each request has.
        seq_lens: ``[B]``, tokens that it is to have.
        last_loc: ``[B]``, slot of its last token.
        free_pages: ``[N]``; with too few ``out`` is of no use, as with SGLang's kernels.
        out: ``[sum(seq_lens - prefix_lens)] int64``, written.
        page_size: tokens of a page of SGLang's.
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
