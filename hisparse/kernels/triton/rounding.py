"""Rounding that is the same compiled and in Triton's interpreter."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["INTERPRETED", "rounded"]

#: Whether kernels run in Triton's interpreter. It multiplies bfloat16 matrices as if they were
#: integers, so kernels multiply them as float32 there.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def rounded(x, kind: tl.constexpr):
    """Round float32 to the nearest of ``kind``; the interpreter would truncate to bfloat16."""
    if INTERPRETED and kind == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        # It converts what is left below a bfloat16 of 0 to another number: nothing may be left.
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(kind)
