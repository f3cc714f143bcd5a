"""What ``checked: true`` verifies in every decode step; slow, for finding faults."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.batch import DecodeStep
from hisparse.cache.device_buffer import DeviceBuffer
from hisparse.cache.host_pool import HostKVPool
from hisparse.errors import HiSparseError
from hisparse.types import Selection

__all__ = ["check_resident", "check_selection"]


def check_selection(layer_id: int, selection: Selection, step: DecodeStep) -> None:
    """Pages in range, ascending (so unique), padded with -1 at the end, no more than allowed.

    Raises:
        HiSparseError: names the layer, the request and the pages.
    """
    pages, lengths = selection
    index = torch.arange(pages.shape[-1], device=pages.device)
    used = index < lengths[..., None]
    in_range = (pages >= 0) & (pages < step.num_pages[:, None, None])
    ascending = torch.ones_like(used)
    ascending[..., 1:] = (pages[..., 1:] > pages[..., :-1]) | ~used[..., 1:]
    good = torch.where(used, in_range & ascending, pages == -1)
    if not bool(good.all()):
        request, head, _ = (~good).nonzero()[0].tolist()
        raise HiSparseError(
            f"layer {layer_id}, request {request}, head {head}: got a selection of pages "
            f"{pages[request, head].tolist()} with length {int(lengths[request, head])}, expected "
            f"ascending pages below {int(step.num_pages[request])}, then -1"
        )


def check_resident(
    layer_id: int,
    selection: Selection,
    table: Tensor,
    step: DecodeStep,
    host: HostKVPool,
    device: DeviceBuffer,
) -> None:
    """Every selected page's bytes on the device equal the host page's (invariant 2).

    Where two requests computed the same tokens, SGLang's radix cache gives both the host page of
    one of them: then the other's device page holds the same values but for rounding.

    Args:
        layer_id: layer number.
        selection: what was selected.
        table: ``[R, K] int32``, the device pages that it was given.
        step: the step.
        host, device: where the bytes lie.

    Raises:
        HiSparseError: names the layer, the row and the page.
    """
    heads = step.policy.heads
    host_kv, device_kv = host.layer(layer_id), device.layer(layer_id)
    pages = selection.pages.reshape(table.shape)
    for row, entry in (pages >= 0).nonzero().tolist():
        page = int(pages[row, entry])
        host_page = int(step.host_page_table[row // heads, page])
        head = slice(None) if heads == 1 else [row % heads * host.kv.num_kv_heads // heads]
        for host_pages, device_pages in zip(host_kv, device_kv, strict=True):
            there = device_pages[int(table[row, entry])].to(host_pages.device)
            here = host_pages[host_page, head]
            if torch.equal(there, here):
                continue
            off = float((there.float() - here.float()).abs().max() / here.float().abs().max())
            if not off <= torch.finfo(here.dtype).eps ** 0.5:
                raise HiSparseError(
                    f"layer {layer_id}, row {row}: page {page} on the device (page "
                    f"{int(table[row, entry])}) differs from host page {host_page} by {off:.1e} of "
                    "its largest value"
                )
