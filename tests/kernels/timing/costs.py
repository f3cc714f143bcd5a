"""What an instruction takes on sm_90, in cycles.

Throughput is that of NVIDIA's table "Throughput of Native Arithmetic Instructions" for compute
capability 9.0 (CUDA C++ Programming Guide, 8.4.1), for one of the four schedulers of a
multiprocessor. Latencies: arXiv 2402.13499 and 2501.12084 (Hopper), arXiv 1804.06826 for what these
do not measure. The first load of a sector by a block misses every cache, later ones hit the first.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.kernels.timing.code import Instruction

#: From the start of an instruction to that of one that needs its result.
LATENCY: Mapping[str, float] = {
    **dict.fromkeys(("ATOMG", "ATOM"), 600),
    **dict.fromkeys(("LDG", "LD"), 40),
    **dict.fromkeys(("LDS", "LDSM", "LDL"), 30),
    "ATOMS": 60,
    "SHFL": 24,
    **dict.fromkeys(("REDUX", "MATCH"), 30),
    **dict.fromkeys(("MUFU", "I2F", "F2I", "F2F", "POPC", "FLO", "BREV"), 20),
    **dict.fromkeys(("S2R", "S2UR", "R2UR", "CS2R", "B2R", "LDC"), 20),
    **dict.fromkeys(("HMMA", "IMMA"), 33),
    "HGMMA": 64,
    **dict.fromkeys(("VOTE", "VOTEU"), 10),
}
LATENCY_OF_ALL_OTHERS = 5.0
#: Of a load of device memory and of host memory that misses, and from the last warp that comes to a
#: barrier to all going on.
MISS_LATENCY, HOST_LATENCY, BARRIER = 600.0, 3500.0, 20.0
#: Of a load of another block's shared memory (arXiv 2402.13499: 180), and a cluster's barrier.
CLUSTER_LATENCY = 200.0
#: Cycles in which a scheduler can start no other instruction for the same unit, by opcode: 32 over
#: the table's results a clock and scheduler.
_SIXTEEN = (
    "MUFU", "I2F", "F2I", "F2F", "POPC", "FLO", "BREV", "REDUX", "MATCH",
)  # fmt: skip
_SHARED = (
    "LDS", "STS", "LDSM", "ATOMS", "SHFL", "LDG", "STG", "LD", "ST", "LDL", "STL", "LDGSTS",
    "STSM", "ATOMG", "ATOM", "RED", "REDG",
)  # fmt: skip
_INTEGER = (
    "IADD3", "VIADD", "LEA", "LOP3", "SHF", "PRMT", "ISETP", "SEL", "IMNMX", "VIMNMX",
    "VIMNMX3", "VIADDMNMX", "IABS", "PLOP3", "P2R", "R2P", "FSETP", "FSEL", "FMNMX", "SGXT",
    "HSETP2", "VOTE", "VOTEU", "I2FP", "F2FP",
)  # fmt: skip
UNITS: Mapping[str, tuple[str, float]] = {
    **dict.fromkeys(_SIXTEEN, ("special", 8.0)),
    # The pipe that the schedulers share takes a wavefront a cycle: `BlockRun.wavefronts`.
    **dict.fromkeys(_SHARED, ("memory", 1.0)),
    **dict.fromkeys(_INTEGER, ("integer", 2.0)),
    "IMAD": ("multiply", 2.0),
    **dict.fromkeys(("FFMA", "FMUL", "FADD", "HFMA2", "HMUL2", "HADD2"), ("multiply", 1.0)),
    # 62% of the tensor cores' rate, as mma.sync reaches (arXiv 2402.13499): 2,048 products at 1,024
    # a clock and multiprocessor.
    **dict.fromkeys(("HMMA", "IMMA"), ("tensor", 6.5)),
    # Of few queries: the time in which its 64 rows are read from shared memory.
    "HGMMA": ("tensor", 16.0),
}


def issue_cycles(each: Instruction) -> float:
    """Cycles after which the same warp can start its next instruction."""
    return 2.0 if each.name in ("BRA", "BSYNC", "CALL", "RET", "BRX", "EXIT") else 1.0


def unit_cycles(each: Instruction) -> tuple[str, float]:
    """The unit of a scheduler that an instruction keeps busy, and for how long."""
    return ("uniform", 2.0) if each.uniform else UNITS.get(each.name, ("issue", 1.0))
