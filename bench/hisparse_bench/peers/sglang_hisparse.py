"""SGLang's own HiSparse swap-in: one fused kernel for bookkeeping and copies; CUDA only.

Written after SGLang 0.5.23's coordinator and not run on a GPU yet: the benchmark compares the pages
that it loads with the host pool and leaves it out if they differ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def fused_swap_in(
    host: Tensor, table: Tensor, width: int, slots: int
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """A function from ``selection [R, K] int32`` to buffer rows ``[R, K]`` and the device buffer.

    Args:
        host: ``[tokens, row bytes] uint8``, pinned.
        table: ``[R, P] int32``, host row of each token, on the device.
        width: K.
        slots: device slots of each request, without the one for the newest token.

    Raises:
        ImportError: SGLang is not installed, or has no such kernel.
    """
    from sglang.kernels.ops.kvcache.hisparse import load_cache_to_device_buffer_mla

    rows, context = table.shape
    device, row_bytes = table.device, host.shape[1]
    held = torch.full((rows, slots + 1), -1, dtype=torch.int32, device=device)
    places = torch.arange(rows * (slots + 1), dtype=torch.int32, device=device).view_as(held)
    order = torch.arange(slots, dtype=torch.int16, device=device).repeat(rows, 1)
    buffer = torch.zeros(rows * (slots + 1), row_bytes, dtype=torch.uint8, device=device)
    found = torch.full((rows, width), -1, dtype=torch.int32, device=device)
    host_rows, requests = table.long(), torch.arange(rows, device=device)
    # Longer than the buffer, and so long that no selected token is the newest.
    lengths = torch.full((rows,), max(context, slots) + 2, dtype=torch.int64, device=device)
    real = torch.full((1,), rows, dtype=torch.int32, device=device)

    def swap_in(selection: Tensor) -> tuple[Tensor, Tensor]:
        load_cache_to_device_buffer_mla(
            top_k_tokens=selection,
            device_buffer_tokens=held,
            host_cache_locs=host_rows,
            device_buffer_locs=places,
            host_cache=host,
            device_buffer=buffer,
            top_k_device_locs=found,
            req_pool_indices=requests,
            seq_lens=lengths,
            lru_slots=order,
            item_size_bytes=row_bytes,
            num_top_k=width,
            hot_buffer_size=slots,
            num_real_reqs=real,
        )
        return found, buffer

    return swap_in
