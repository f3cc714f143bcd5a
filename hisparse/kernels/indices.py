"""Checks of indices, which read tensors on the device to find a fault.

On a GPU no kernel follows an index out of a tensor. A kernel leaves such an entry, or a whole row,
as it is, and reports nothing, because a report would wait for the device. These functions wait and
raise. ``SparseKVCacheManager`` calls them when the configuration says ``checked: true``.
"""

from __future__ import annotations

from torch import Tensor

from hisparse.errors import KernelError

__all__ = ["verify_capacity", "verify_diff", "verify_indices"]


def verify_indices(name: str, index: Tensor, low: int, size: int) -> None:
    """Raise ``KernelError`` unless ``low <= index < size``.

    Args:
        name: of the tensor, for the message.
        index: integers of any shape.
        low: -1 where -1 stands for "none", else 0.
        size: of the dimension that ``index`` points into.
    """
    if index.numel() == 0:
        return
    least, most = int(index.min()), int(index.max())
    if least < low or most >= size:
        got = least if least < low else most
        raise KernelError(f"{name}: got {got}, expected {low} to {size - 1}")


def verify_diff(num_misses: Tensor, capacity: Tensor) -> None:
    """Raise ``KernelError`` if ``lru_diff`` or ``diff_tables`` refused a row.

    Args:
        num_misses: ``[R] int32``, as returned; -1 for a refused row.
        capacity: ``[R] int32``, as given.
    """
    refused = (num_misses < 0).nonzero().flatten().tolist()
    if refused:
        row = refused[0]
        raise KernelError(
            f"selection: row {row} cannot be served, expected pages of the host page table, no "
            f"more of them than its capacity {int(capacity[row])}, and a state row with such slots"
        )


def verify_capacity(rows: Tensor, new_capacity: Tensor, capacity: Tensor, num_free: Tensor) -> None:
    """Raise ``KernelError`` if ``rebalance`` left a row without the capacity asked for.

    Args:
        rows: ``[M] int64``, as given to ``rebalance``.
        new_capacity: ``[M] int32``, as given to ``rebalance``.
        capacity: ``[NR] int32``, after it.
        num_free: ``[L] int32``, after it.
    """
    got, asked = capacity[rows].tolist(), new_capacity.tolist()
    for row, pages, wanted in zip(rows.tolist(), got, asked, strict=True):
        if pages != wanted:
            raise KernelError(
                f"new_capacity: row {row} got {pages} pages, expected {wanted}; "
                f"{int(num_free[0])} pages are free"
            )
