"""The CUDA operations as an implementation: each call runs under many orders of threads.

All orders start from the same tensors and have to leave the same bytes behind. Races that change no
byte are found, too (``races.cpp``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hisparse.kernels.build import cuda as _build_cuda
from hisparse.kernels.operation import Operation
from tests.sizes import SWEEPS, sized

NUM_ORDERS = sized(4, 20)

_seeds = itertools.count()


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def in_all_orders(call: Callable[[], Any], written: Iterable[Tensor]) -> Any:
    """Run ``call``, which changes ``written``, under ``NUM_ORDERS`` orders; the last one stays.

    Raises:
        AssertionError: two orders have different results.
        RuntimeError: a launch fails; threads race.
    """
    written = list(written)
    before = [tensor.clone() for tensor in written]
    first: list[Tensor] | None = None
    for seed in itertools.islice(_seeds, NUM_ORDERS):
        for tensor, old in zip(written, before, strict=True):
            tensor.copy_(old)
        _build_cuda.call_cuda("set_seed", seed)
        # One order shows the races of all, but where an order decides what the threads do.
        _build_cuda.call_cuda("set_races", SWEEPS or first is None)
        result = call()
        returned = [x for x in tree_leaves(result) if x is not None]
        after = [bits(tensor).clone() for tensor in (*written, *returned)]
        first = first or after
        assert all(map(torch.equal, first, after)), f"seed {seed} gives other results"
    return result


def in_orders(operation: Operation) -> Callable[..., Any]:
    """The operation's CUDA function under all orders. Triton does not run on fibers."""
    function = operation.lookup("cuda")
    if function is None:
        return operation.function("reference")

    return lambda *args: in_all_orders(lambda: function(*args), written(operation, args))


def written(operation: Operation, args: tuple[Any, ...]) -> list[Tensor]:
    """Tensors among an implementation's arguments that it writes to: declared ones, and more."""
    leaves, count = tree_leaves(args), len(operation.arguments)
    declared = zip(operation.arguments, leaves, strict=False)
    written = [tensor for argument, tensor in declared if argument.written]
    return [x for x in (*written, *leaves[count:]) if isinstance(x, Tensor)]
