"""The CUDA operations as an implementation: each call runs under many orders of threads.

All orders start from the same tensors and have to leave the same bytes behind.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hisparse.kernels import cuda
from hisparse.kernels.build import cuda as _build_cuda
from tests.sizes import sized

NUM_ORDERS = sized(4, 20)

_seeds = itertools.count()


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def in_all_orders(call: Callable[[], Any], written: Iterable[Tensor]) -> Any:
    """Run ``call``, which changes ``written``, under ``NUM_ORDERS`` orders; the last one stays.

    Raises:
        AssertionError: two orders have different results.
    """
    written = list(written)
    before = [tensor.clone() for tensor in written]
    first: list[Tensor] | None = None
    for seed in itertools.islice(_seeds, NUM_ORDERS):
        for tensor, old in zip(written, before, strict=True):
            tensor.copy_(old)
        _build_cuda.call_cuda("set_seed", seed)
        result = call()
        returned = [result] if isinstance(result, Tensor) else list(result or ())
        after = [bits(tensor).clone() for tensor in (*written, *returned)]
        first = first or after
        assert all(map(torch.equal, first, after)), f"seed {seed} gives other results"
    return result


def _wrap(name: str, written: Callable[..., Iterable[Tensor]]) -> Callable[..., Any]:
    op = getattr(cuda, name)

    @functools.wraps(op)
    def run(*args: Any) -> Any:
        return in_all_orders(functools.partial(op, *args), written(*args))

    return run


def promote_tail(*args: Any) -> tuple[Tensor, ...]:
    """Zeros in place of what the operation leaves uninitialised."""

    def call() -> tuple[Tensor, ...]:
        copies = cuda.promote_tail(*args)
        filled = args[2].view(len(args[1]), -1)[:, 0]
        for copy in copies:
            copy[~filled] = 0
        return copies

    copies: tuple[Tensor, ...] = in_all_orders(call, (*args[4], args[5]))
    return copies


# By the operation's own arguments, which of them it writes to.
lru_diff = _wrap("lru_diff", lambda *a: (*a[4][:2], *(a[6] or ())))
page_table = _wrap("page_table", lambda *a: ())
diff_tables = _wrap("diff_tables", lambda *a: (*a[3][:2], *(x for x in a[2][8:] if x is not None)))
append_tokens = _wrap("append_tokens", lambda *a: (*a[1], *a[3]))
reset_rows = _wrap("reset_rows", lambda *a: a[2])
rebalance = _wrap("rebalance", lambda *a: (a[2], *a[3], a[4], a[5]))
gather_pages = _wrap("gather_pages", lambda *a: a[2])
scatter_tokens = _wrap("scatter_tokens", lambda *a: a[1])
gather_tokens = _wrap("gather_tokens", lambda *a: ())
select = _wrap("select", lambda *a: [] if a[4].invalid_scores is None else [a[4].invalid_scores])
