"""Compares what a build of the kernels left behind with what was recorded."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.isa.calls import Call, Result, View

__all__ = ["TOLERANCE", "difference"]

#: Of float32, relative to one more than the largest number of the row.
#:
#: Another width of vectors sums products in another order, and other processors fuse other
#: multiplications with additions. Sums of this suite differ by 3e-7 of the largest one. Attention
#: differs by 5e-6 where logits are in the hundreds: a logit's rounding error is the relative error
#: of its weight. A product that is left out or counted twice differs by 1e-3 and more.
TOLERANCE = 2e-5

#: Kernels that compute in another precision where a processor has the instructions for it.
#:
#: ``sketch_score`` rounds queries to 8 bits, and without AVX-512 their products with a page's
#: scales too. That was 3e-2 of one more than a row's largest score, and 6e-2 in one of 5,440.
_TOLERANCES = {"sketch_score": 1e-1}


def difference(call: Call, expected: Result, got: Result) -> str | None:
    """The first difference in one line, or None.

    Integers, flags, codes and floats of less than 32 bits are compared exactly, and so is memory
    between the rows of a tensor; float32 within the kernel's tolerance.
    """
    if got.outcome != expected.outcome:
        return f"got {got.outcome!r}, expected {expected.outcome!r}"
    if expected.outcome != "ok" or got.buffers == expected.buffers:
        # What a refused call has written is not defined.
        return None
    got = got._replace(buffers=[bytearray(memory) for memory in got.buffers])
    for i, view in enumerate(call.arguments):
        tolerance = _TOLERANCES.get(call.name, TOLERANCE)
        if isinstance(view, View) and (line := _compare(view, expected, got, tolerance)):
            return f"argument {i}: {line}"
    return None if got.buffers == expected.buffers else "got a write between rows, expected none"


def _compare(view: View, expected: Result, got: Result, tolerance: float) -> str | None:
    ours, theirs = view.of(got.buffers), view.of(expected.buffers)
    if view.dtype != torch.float32:
        ours, theirs = _exact(ours), _exact(theirs)
        return _first(ours, theirs, ours != theirs)
    sizes = theirs.nan_to_num(0, 0, 0).abs()
    if sizes.ndim and sizes.numel():
        sizes = sizes.amax(-1, keepdim=True)
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    close = same | ((ours - theirs).abs() <= tolerance * (1 + sizes))
    line = _first(ours, theirs, ~close)
    ours.copy_(theirs)  # What is left to compare is exact.
    return line


def _exact(x: Tensor) -> Tensor:
    return x.view(torch.int16) if x.itemsize == 2 else x.view(torch.uint8) if x.itemsize == 1 else x


def _first(got: Tensor, expected: Tensor, wrong: Tensor) -> str | None:
    places = wrong.nonzero()
    if len(places) == 0:
        return None
    at = places[0].tolist()
    ours, theirs = got[tuple(at)].item(), expected[tuple(at)].item()
    return f"got {ours} at {at}, expected {theirs} ({len(places)} of {wrong.numel()} differ)"
