"""Changes to rows outside ``diff_tables``: for capacity, reuse and full tail pages."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hisparse.errors import KernelError
from hisparse.kernels.arguments import Arg, check_all
from hisparse.kernels.lru.op import RowState, tables
from hisparse.kernels.operation import Operation, new_tensors

__all__ = [
    "TailPools",
    "drop_pages",
    "promote_tail",
    "rebalance",
    "reset_rows",
    "verify_capacity",
]

_I32, _I64 = torch.int32, torch.int64
#: Scratch of ``rebalance`` on a GPU, unless one row takes more: enough blocks to fill one.
REBALANCE_BYTES = 16 << 20


class TailPools(NamedTuple):
    """Pools of device pages, ``[N, Hr, S, D]``.

    Attributes:
        k, v: keys and values of one dtype, any; None: those are not copied. Hr is the number of KV
            heads, or 1 if a row has one head.
        kv_heads: Hkv.
    """

    k: Tensor | None = None
    v: Tensor | None = None
    kv_heads: int = 1


_NO_POOLS = TailPools()


def _rows_have_requests(tensors: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    rows, requests = sizes["R"], sizes["T"]
    if (rows % requests if requests else rows) != 0:
        raise KernelError(
            f"page_index: got {requests} requests, expected a divisor of the {rows} rows"
        )
    heads = sizes["kv_heads"] if rows == requests else 1
    pools = {name: tensors[name] for name in ("pools.k", "pools.v") if tensors[name] is not None}
    if sizes["kv_heads"] < 1:
        raise KernelError(f"pools.kv_heads: got {sizes['kv_heads']}, expected 1 or more")
    if pools and rows != requests and rows // requests % sizes["kv_heads"]:
        raise KernelError(
            f"rows: got {rows // requests} of each request, expected as many as it has KV heads, "
            f"{sizes['kv_heads']}, or a multiple"
        )
    for name, pool in pools.items():
        if pool.shape[1] != heads:
            expected = f"[any, {heads}, any, any]"
            raise KernelError(f"{name}: got shape {list(pool.shape)}, expected {expected}")


def _promote(call: Callable[..., Any], *tensors: Any) -> tuple[Tensor, ...]:
    """The same call copies the pages."""
    *lists, state, tail_pages, pools = tensors
    given = [pool for pool in pools[:2] if pool is not None]
    shapes = [((len(lists[1]), pools.kv_heads, *x.shape[-2:]), x.dtype) for x in given]
    copies = new_tensors("promote_tail", shapes, tail_pages.device)
    # The kernel takes its second pool only beside a first one.
    call(*lists, *state, tail_pages, *(*given, None, None)[:2], *(*copies, None, None)[:2])
    return tuple(copies)


def _rebalance_on_cuda(call: Callable[..., Any], *tensors: Any) -> None:
    """Allocate scratch for the rows that change at once, and a plan in which no row changes."""
    rows, new, capacity, states, *free = tensors
    layers, _, slots = states.slot_pages.shape
    row_bytes = max(8 * layers * slots, 1)
    at_once = min(len(rows), max(REBALANCE_BYTES // row_bytes, 1))
    scratch = capacity.new_empty((at_once, layers, 2, slots))
    plan = capacity.new_full((len(rows), 2), -1)
    call(rows, new, capacity, *states, *free, scratch, plan)


PROMOTE_TAIL = Operation(
    __name__,
    "promote_tail",
    Arg("rows", "R", _I64),
    Arg("page_index", "T", _I32),
    Arg("filled", "R", torch.bool),
    Arg("capacity", "R", _I32),
    *tables("NR", pages_move=True),
    Arg("tail_pages", "NR", _I32, written=True, layout="any"),
    Arg("pools.k", "N Hr S _", optional=True, layout="any"),
    Arg("pools.v", "N Hr S _", like="pools.k", optional=True, layout="any"),
    values=("kv_heads",),
    cpu=_promote,
    cuda=_promote,
    also=_rows_have_requests,
)
RESET_ROWS = Operation(
    __name__,
    "reset_rows",
    Arg("rows", "M", _I64),
    Arg("capacity", "NR", _I32),
    *tables("L NR", pages_move=False),
    cuda=lambda call, rows, capacity, states: call(rows, capacity, *states),
)
REBALANCE = Operation(
    __name__,
    "rebalance",
    Arg("rows", "M", _I64),
    Arg("new_capacity", "M", _I32),
    Arg("capacity", "NR", _I32, written=True, layout="any"),
    *tables("L NR", pages_move=True),
    Arg("free_pages", "L _", _I32, written=True, layout="any"),
    Arg("num_free", "L", _I32, written=True, layout="any"),
    cpu=lambda call, rows, new, capacity, states, *free: call(rows, new, capacity, *states, *free),
    cuda=_rebalance_on_cuda,
)


_DROP_PAGES = (
    Arg("rows", "M", _I64),
    Arg("stale", "P", torch.bool),
    *tables("L NR", pages_move=False),
)


def promote_tail(
    rows: Tensor,
    page_index: Tensor,
    filled: Tensor,
    capacity: Tensor,
    state: RowState,
    tail_pages: Tensor,
    *,
    pools: TailPools = _NO_POOLS,
    impl: str = "auto",
) -> tuple[Tensor, ...]:
    """Let full tail pages enter the LRU as hottest, in place of the coldest slot's page.

    Device page ids are exchanged: the evicted page's memory becomes the row's next tail page.

    Args:
        rows: ``[R] int64``, state rows, unique; row r belongs to request ``r // (R // T)``.
        page_index: ``[T] int32``, index of each request's tail page in its sequence.
        filled: ``[R] bool``; other rows stay as they are, as do rows without capacity.
        capacity: ``[R] int32``.
        state: tables of the layer.
        tail_pages: ``[NR] int32``, device page of each state row's tail.
        pools: device pages whose full tail pages are copied.

    Returns:
        copies of the full tail pages, ``[T, Hkv, S, D]`` in the dtype of each pool; a GPU leaves
        the entries of requests whose tail page is not full uninitialised.
    """
    tensors = (rows, page_index, filled, capacity, *state, tail_pages, pools.k, pools.v)
    run = PROMOTE_TAIL(impl, *tensors, values=(pools.kv_heads,))
    copies: tuple[Tensor, ...] = run(*tensors[:4], state, tail_pages, pools)
    return copies


def reset_rows(rows: Tensor, capacity: Tensor, states: RowState, *, impl: str = "auto") -> None:
    """Empty the slots of rows, in all layers; rows keep their capacity and device pages.

    Args:
        rows: ``[M] int64``, state rows.
        capacity: ``[NR] int32``.
        states: tables of all layers, ``[L, NR, C]`` each.
    """
    RESET_ROWS(impl, rows, capacity, *states)(rows, capacity, states)


def drop_pages(rows: Tensor, stale: Tensor, states: RowState) -> None:
    """Empty the slots that hold certain pages, in all layers; these slots become the coldest.

    Runs once after some prefills, so PyTorch's operations serve all devices.

    Args:
        rows: ``[M] int64``, state rows, unique.
        stale: ``[P] bool``, the page indices to drop; pages from P on stay.
        states: tables of all layers, ``[L, NR, C]`` each.
    """
    check_all(_DROP_PAGES, (rows, stale, *states), {}, "rows")
    held, order = states.slot_pages.index_select(1, rows), states.lru_order[:, rows]
    # The last entry is for empty slots and for pages that stay.
    kept = torch.nn.functional.pad(~stale, (0, 1), value=True)
    held = held.where(kept[held.long().clamp(-1, len(stale))], -1)
    is_empty = held.gather(2, order.long().clamp(min=0)) < 0
    rank = torch.where(order < 0, 2, torch.where(is_empty, 0, 1))
    states.lru_order[:, rows] = order.gather(2, rank.argsort(dim=2, stable=True))
    states.slot_pages[:, rows] = held


def rebalance(
    rows: Tensor,
    new_capacity: Tensor,
    capacity: Tensor,
    states: RowState,
    free_pages: Tensor,
    num_free: Tensor,
    *,
    impl: str = "auto",
) -> None:
    """Change the capacity of rows, in all layers; no K/V bytes move.

    Shrinks come before grows, each in the order of ``rows``. A shrinking row drops its coldest
    slots and pushes their device pages, cold to hot, onto the free stack; a growing row pops its
    new pages one by one. A changed row's slots are renumbered ``0..n-1`` from cold to hot, newly
    gained empty slots first. A row that keeps its capacity does not change.

    The caller plans on the host, so nothing is read back from the device. A plan that does not fit
    changes less: a row whose new capacity is outside 0 to C stays as it is, and so does the first
    row that asks for more pages than are free, with all rows that grow after it.
    :func:`hisparse.kernels.verify_capacity` reports such rows.

    Args:
        rows: ``[M] int64``, state rows, unique.
        new_capacity: ``[M] int32``, 0 to C.
        capacity: ``[NR] int32``, updated.
        states: tables of all layers, ``[L, NR, C]`` each.
        free_pages: ``[L, N] int32``, stack of free device pages: the first ``num_free`` of a layer.
        num_free: ``[L] int32``, the same for every layer; updated.
    """
    run = REBALANCE(impl, rows, new_capacity, capacity, *states, free_pages, num_free)
    if rows.numel():
        run(rows, new_capacity, capacity, states, free_pages, num_free)


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
