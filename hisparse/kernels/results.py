"""Allocates what a native kernel writes its results to, for each call anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hisparse.kernels.arguments import Arg, Result, Shape

__all__ = ["allocator"]

Allocator = Callable[[Sequence[Tensor | None], Mapping[str, int]], "tuple[Tensor, ...]"]


def allocator(arguments: Sequence[Arg], results: Sequence[Result]) -> Allocator:
    """Compile a function that returns uninitialised results.

    As Python text, for a loop over declarations would take longer than PyTorch's allocations. Those
    are cheapest after a tensor of the same shape and dtype, and dear if a dtype has to be given.

    Args:
        arguments: the tensors that an operation takes.
        results: the tensors that it returns.

    Returns:
        a function of a call's tensors, of which the last ones may be left out, and of the sizes
        that no tensor has.
    """
    known: dict[str, tuple[Any, Shape]] = {
        f"given[{i}]": (x.dtypes, x.shape) for i, x in enumerate(arguments) if not x.optional
    }
    made = []
    for number, result in enumerate(results):
        shape = Shape(result.shape)
        dtype = result.dtype if isinstance(result.dtype, str) else (result.dtype,)
        same = [text for text, (dtypes, _) in known.items() if dtypes == dtype]
        if isinstance(dtype, str):
            named = [i for i, x in enumerate(arguments) if x.name == dtype]
            same = [*same, *(f"given[{i}]" for i in named)]
        alike = [name for name in same if known[name][1].sizes == shape.sizes]
        sizes = ", ".join(_size(known, *size) for size in shape.sizes)
        if alike:
            text = f"torch.empty_like({alike[0]})"
        elif same:
            text = f"{same[0]}.new_empty({sizes})"
        else:
            where = next(iter(known))
            text = f"torch.empty(({sizes},), dtype={result.dtype}, device={where}.device)"
        made.append(f"(r{number} := {text})")
        known[f"r{number}"] = (dtype, shape)
    text = f"lambda given, sizes: ({''.join(f'{x}, ' for x in made)})"
    compiled: Allocator = eval(text, {"torch": torch})
    return compiled


def _size(known: Mapping[str, tuple[Any, Shape]], name: str, factor: int, more: int) -> str:
    """The text of a size."""
    text = f"sizes[{name!r}]"
    for tensor, (_, shape) in known.items():
        for dim, size in enumerate(shape.sizes):
            if size == (name, 1, 0):
                text = f"{tensor}.shape[{dim - len(shape.sizes)}]"
    return f"{factor} * {text} + {more}" if (factor, more) != (1, 0) else text
