"""What a multiprocessor holds of a kernel, and faults of its PTX."""

from __future__ import annotations

import re

__all__ = ["blocks_per_sm", "ptx_fault"]

_LANES = 32
#: Of a multiprocessor, by architecture: bytes of shared memory. All have 64 K registers, 64 warps
#: and 32 blocks. https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
_SHARED = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
#: Shared memory that the driver takes for each block.
_RESERVED = 1024


def blocks_per_sm(arch: int, registers: int, warps: int, shared: int) -> int:
    """Blocks that fit one multiprocessor at a time."""
    # Registers are given to a warp in units of 256.
    of_warp = -(-registers * _LANES // 256) * 256
    limits = [32, 64 // warps, 65536 // (of_warp * warps)]
    return min(*limits, _SHARED[arch] // (shared + _RESERVED))


def ptx_fault(ptx: str, *, merges: bool) -> str:
    """What makes a kernel's PTX wrong where programs or steps share memory; empty: nothing.

    Args:
        ptx: of one kernel.
        merges: whether the program that ends last merges what the others stored.
    """
    if "ld.global.nc" in ptx:
        return "has ld.global.nc, which may read what was there before a store"
    seen = re.findall(r"\b(st\.global|ld\.global|bar\.sync|atom\.\S*acq_rel)", ptx)
    arrivals = [at for at, name in enumerate(seen) if name.startswith("atom")]
    if merges and not arrivals:
        return "merges splits without atom.acq_rel"
    for at in arrivals:
        # The thread that arrives releases what all threads of the program stored before a barrier,
        # and they read behind another one.
        if seen[at - 1 : at + 2 : 2] != ["bar.sync"] * 2:
            return "has no bar.sync on both sides of atom.acq_rel"
    return ""
