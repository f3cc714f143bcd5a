"""Reads machine code: instructions, loops, and the bytes that they load from global memory; PTX."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Loop", "blocks_per_sm", "hot_loop", "ptx_fault"]

_LANES = 32
#: Of a multiprocessor, by architecture: bytes of shared memory. All have 64 K registers, 64 warps
#: and 32 blocks. https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
_SHARED = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
#: Shared memory that the driver takes for each block.
_RESERVED = 1024


class Loop(NamedTuple):
    """A loop, or a program without one.

    Attributes:
        instructions: of one pass.
        load_bytes: bytes that a warp asks global memory for in one pass.
    """

    instructions: int
    load_bytes: int

    @property
    def per_kib(self) -> float:
        """Instructions for each KiB that a warp loads."""
        return self.instructions * 1024 / self.load_bytes


def hot_loop(code: str) -> tuple[int, Loop]:
    """The number of instructions of nvdisasm's ``code``, and the loop that loads the most.

    Of nested loops the inner ones count. A program whose loops load nothing counts as a whole.
    """
    labels: dict[str, int] = {}
    lines: list[str] = []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_[\w.]+):", line):
            labels[label[1]] = len(lines)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.+?);", line):
            lines.append(found[1])
    # nvdisasm ends a program by a jump to itself and by padding.
    end = next((at for at, text in enumerate(lines) if _jumps_to(text, labels) == at), len(lines))
    loops = [
        (target, at + 1)
        for at, text in enumerate(lines[:end])
        if (target := _jumps_to(text, labels)) is not None and target < at
    ]
    inner = [
        (start, stop)
        for start, stop in loops
        if not any(start <= a and b <= stop and (a, b) != (start, stop) for a, b in loops)
    ]
    found_loops = [Loop(stop - start, _bytes(lines[start:stop])) for start, stop in inner]
    best = max(found_loops, key=lambda loop: loop.load_bytes, default=Loop(0, 0))
    return end, best if best.load_bytes else Loop(end, _bytes(lines[:end]))


def _jumps_to(text: str, labels: dict[str, int]) -> int | None:
    found = re.search(r"\bBRA\S* .*?`\((\.L_[\w.]+)\)", text)
    return labels.get(found[1]) if found else None


def _bytes(lines: list[str]) -> int:
    total = 0
    for text in lines:
        # LDG loads to a register, LDGSTS to shared memory.
        if found := re.search(r"\bLDG(?:STS)?\.(\S+)", text):
            width = re.search(r"\b(?:[US](8|16)|(64|128))\b", found[1])
            bits = int(next(filter(None, width.groups()))) if width else 32
            total += bits // 8 * _LANES
    return total


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
