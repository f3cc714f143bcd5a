"""The checks that ``checked: true`` adds to every decode step; slow, meant for debugging."""

from __future__ import annotations

import torch
from torch import Tensor

from hisparse.algorithms import DecodeStep
from hisparse.cache.device_pool import DevicePool
from hisparse.cache.host_pool import HostKVPool
from hisparse.errors import HiSparseError, shorten
from hisparse.types import Selection, StoredKV


def check_selection(layer_id: int, selection: Selection, step: DecodeStep) -> None:
    """Check that pages are in range, ascending (so unique), and padded with -1 at the end.

    Raises:
        HiSparseError: a page is wrong; the message names the layer, the request and the pages.
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
        got = shorten(pages[request, head].tolist())
        raise HiSparseError(
            f"layer {layer_id}, request {request}, head {head}: got a selection of pages "
            f"{got} with length {int(lengths[request, head])}, expected "
            f"ascending pages below {int(step.num_pages[request])}, then -1"
        )


def check_resident(
    layer_id: int,
    selection: Selection,
    table: Tensor,
    step: DecodeStep,
    host: HostKVPool,
    device: DevicePool,
) -> None:
    """Check that each selected page has the same bytes on the device and in host memory.

    Args:
        layer_id: layer number.
        selection: the selected pages.
        table: ``[R, K] int32``, the device page of each selected page.
        step: the requests that attend.
        host, device: the two pools.

    Raises:
        HiSparseError: a page differs; the message names the layer, the row and the page.
    """
    heads = step.policy.heads
    host_kv, device_kv = host.stored(layer_id), device.stored(layer_id)
    pages = selection.pages.reshape(table.shape)
    for row, entry in (pages >= 0).nonzero().tolist():
        page = int(pages[row, entry])
        host_page = int(step.host_page_table[row // heads, page])
        head = slice(None) if heads == 1 else [row % heads * host.kv.num_kv_heads // heads]
        on_device = (x[int(table[row, entry])].to("cpu") for x in device_kv.tensors)
        on_host = (x[host_page, head] for x in host_kv.tensors)
        decoded = (host.format.decode(StoredKV(*each)) for each in (on_device, on_host))
        for got, expected in zip(*decoded, strict=True):
            if torch.equal(got, expected):
                continue
            largest = expected.float().abs().max()
            error = float((got.float() - expected.float()).abs().max() / largest)
            raise HiSparseError(
                f"layer {layer_id}, row {row}: page {page} on the device (page "
                f"{int(table[row, entry])}) differs from host page {host_page} by {error:.1e} of "
                "its largest value, expected equal values"
            )
