"""Runs a block of a kernel's machine code, and counts and times its instructions.

Integers, predicates, memory and control flow are computed as a GPU does, so loops run as often as
they do there. Of floats only simple arithmetic is: a tensor core's results are 0.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tests.kernels.timing.code import PT, RZ, UNIFORM, Instruction, Operand, Program
from tests.kernels.timing.costs import (
    HOST_LATENCY,
    LATENCY,
    LATENCY_OF_ALL_OTHERS,
    MISS_LATENCY,
    issue_cycles,
    unit_cycles,
)

Values = Any  # np.ndarray of uint64, one for each thread
MASK = np.uint64(0xFFFFFFFF)
_PARAMS, _WAITS, _SHARED = 0x210, 1 << 30, 256 << 10
_MOST_STEPS = 3_000_000
#: Where code finds the parameters that it reads by an address. Like the next, above the 2 ** 48
#: bytes that a process's own memory may lie in.
_GENERIC = 0x2_0000 << 32
#: The upper half of an address that is one of shared memory.
SHARED_WINDOW = 0x1_0000


class Region(NamedTuple):
    """Memory that the kernel may touch.

    Attributes:
        address: where it begins.
        data: its bytes, which stores change.
        host: it is host memory.
    """

    address: int
    data: Any
    host: bool


class Launched(NamedTuple):
    """A launch: kernel, bytes of its parameters, blocks in x, y and z, threads and bytes of shared
    memory of each, and how many blocks form a cluster.
    """

    kernel: str
    params: bytes
    grid: tuple[int, int, int]
    threads: int
    shared: int
    cluster: int = 1


@dataclass
class BlockRun:
    """What one block does.

    Attributes:
        issues: by instruction, how often a warp starts it.
        cycles: from its start to its end if it had the multiprocessor to itself.
        wavefronts: cycles in which loads, stores and shuffles take the pipe to shared memory and
            the first cache, which is one for the four schedulers.
        sectors: read from and written to device and host memory, 32 bytes each.
    """

    issues: Any
    cycles: float = 0.0
    wavefronts: int = 0
    sectors: dict[tuple[bool, bool], set[int]] = field(default_factory=dict)

    def num_bytes(self, host: bool) -> int:
        """Bytes that it moves from and to device or host memory."""
        return 32 * sum(
            len(found) for (at_host, _), found in self.sectors.items() if at_host == host
        )


class Machine:
    """One block or cluster at a time. Registers are arrays ``[register, thread]``."""

    def __init__(self, program: Program, launch: Launched, memory: Sequence[Region]) -> None:
        self.code, self.launch = program.instructions, launch
        params = Region(_GENERIC, np.frombuffer(launch.params, dtype=np.uint8), False)
        self.memory = sorted([*memory, params], key=lambda region: region.address)
        self._starts = np.array([region.address for region in self.memory], dtype=np.uint64)
        bank = bytearray(4096 + len(launch.params))
        struct.pack_into("<6I", bank, 0, launch.threads, 1, 1, *launch.grid)
        struct.pack_into("<I", bank, 0x28, 0x10000)
        struct.pack_into("<Q", bank, 0x198, _GENERIC)
        bank[_PARAMS : _PARAMS + len(launch.params)] = launch.params
        self.bank = np.frombuffer(bytes(bank), dtype=np.uint8)
        self.tables = np.frombuffer(program.tables, dtype=np.uint8)
        self.handlers = [handler_of(each) for each in self.code]

    def run(self, block: tuple[int, int, int]) -> BlockRun:
        """Run a block to its end, and those of its cluster with it; it is the first of them.

        Raises:
            RuntimeError: it does not end, or it touches memory that is not in ``memory``.
        """
        n = self.launch.cluster * self.launch.threads
        warps = n // 32
        self.block, self.n, self.warps = block, n, warps
        self.r = np.zeros((UNIFORM + 64, n), dtype=np.uint32)
        self.p = np.zeros((16, n), dtype=bool)
        self.p[PT] = self.p[PT + 8] = True
        self.shared = np.zeros(self.launch.cluster * _SHARED, dtype=np.uint8)
        self.local = np.zeros((n, 1 << 12), dtype=np.uint8)
        self.pc = np.zeros(n, dtype=np.int64)
        self.resume = np.zeros(n, dtype=np.int64)
        self.member = np.zeros((16, n), dtype=bool)
        self.waiting = np.full(n, -1)  # barrier of convergence; 16: the block's; 17: the cluster's
        self.exited = np.zeros(n, dtype=bool)
        # Of threads that wait at the block's barrier; and what has become of their last vote.
        self.vote, self.result = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
        self.count = np.zeros(n, dtype=np.int64)
        self.time, self.ready = np.zeros(warps), np.zeros((420, warps))
        self.copies = np.zeros(warps)
        self.groups: list[list[float]] = [[] for _ in range(warps)]
        self.found = BlockRun(np.zeros(len(self.code), dtype=np.int64))
        for _ in range(_MOST_STEPS):
            at = int(self.pc.min())
            if at >= _WAITS:
                if not self.exited.all():
                    raise RuntimeError(f"{self.launch.kernel}: threads wait for each other")
                self.found.cycles = float(self.time.max())
                return self.found
            self._step(at)
        raise RuntimeError(f"{self.launch.kernel}: block {block} does not end")

    def _step(self, at: int) -> None:
        each = self.code[at]
        running = self.pc == at
        warps = running.reshape(-1, 32).any(1)
        self.found.issues[at] += warps.sum()
        self.delay, self.waves = None, 0
        self._issue(each, warps)
        threads = np.repeat(warps, 32) if each.uniform else running
        if each.guard != PT or each.unless:
            threads = threads & (self.p[each.guard] != each.unless)
        self.pc[running] = at + 1
        self.at, self.running = at, running
        t = np.flatnonzero(threads)
        if len(t):
            self.t = t
            self.handlers[at](self, each)
            if unit_cycles(each)[0] == "memory":
                self.found.wavefronts += max(self.waves, len(np.unique(self.t // 32)))
        lasts = self.delay or LATENCY.get(each.name, LATENCY_OF_ALL_OTHERS)
        for register in each.writes:
            self.ready[register, warps] = self.time[warps] + lasts

    def _issue(self, each: Instruction, warps: Any) -> None:
        """A warp starts an instruction when its operands are there, and the next one after it."""
        start = self.time[warps]
        if each.reads:
            start = np.maximum(start, self.ready[list(each.reads)][:, warps].max(0))
        self.time[warps] = start + issue_cycles(each)

    # Operands.

    def u(self, operand: Operand) -> Values:
        """A 32-bit operand of each thread."""
        kind = operand.kind
        if kind == "R":
            value = self.r[operand.value, self.t].astype(np.uint64)
        elif kind == "c":
            value = self.constant(operand, 4)[:, 0].astype(np.uint64)
        elif kind == "#":
            return np.full(len(self.t), operand.value & 0xFFFFFFFF, dtype=np.uint64)
        else:
            raise NotImplementedError(f"operand {operand.text}")
        if operand.absolute:
            value &= np.uint64(0x7FFFFFFF)
        if operand.inverted:
            value ^= MASK
        # So that a sum of it has the right carry.
        return (value ^ MASK) + np.uint64(1) if operand.negative else value

    def s(self, operand: Operand) -> Any:
        """A 32-bit operand as a signed number."""
        return signed(self.u(operand))

    def f(self, operand: Operand) -> Any:
        """A float32 operand."""
        if operand.kind == "#":
            text = operand.text.replace("QNAN", "nan").replace("INF", "inf").strip()
            number = float(int(text, 16)) if "0x" in text else float(text)
            return np.full(len(self.t), number, dtype=np.float32)
        plain = operand._replace(negative=False, absolute=False, inverted=False)
        value = self.u(plain).astype(np.uint32).view(np.float32)
        value = np.abs(value) if operand.absolute else value
        return -value if operand.negative else value

    def pair(self, operand: Operand) -> Values:
        """A 64-bit operand."""
        if operand.kind == "#":
            return np.full(len(self.t), operand.value & (2**64 - 1), dtype=np.uint64)
        if operand.kind == "c":
            return self.constant(operand, 8).view(np.uint64)[:, 0]
        low = operand._replace(negative=False, inverted=False)
        value = self.u(low)
        if operand.value not in (RZ, UNIFORM + 63):
            value |= self.u(low._replace(value=operand.value + 1)) << np.uint64(32)
        return ~value + np.uint64(1) if operand.negative else value

    def q(self, operand: Operand) -> Any:
        """A predicate of each thread."""
        return self.p[operand.value, self.t] ^ operand.inverted

    def constant(self, operand: Operand, width: int) -> Any:
        """``[threads, width / 4]`` words of the constant bank."""
        at = np.full(len(self.t), operand.value & 0xFFFFF, dtype=np.int64)
        bank = (self.bank, None, self.tables)[operand.value >> 20]
        if bank is None:
            raise NotImplementedError(f"constant bank of {operand.text}")
        for register, _, _ in operand.base:
            at += self.r[register, self.t]
        taken = bank[at[:, None] + np.arange(width)]
        if width < 4:
            taken = np.pad(taken, ((0, 0), (0, 4 - width)))
        return np.ascontiguousarray(taken).view(np.uint32)

    # Results.

    def set(self, operand: Operand, value: Any) -> None:
        """Write 32 bits."""
        if operand.value not in (RZ, UNIFORM + 63):
            self.r[operand.value, self._written(operand)] = self._spread(operand, value)

    def set_pair(self, operand: Operand, value: Values) -> None:
        """Write 64 bits."""
        value = np.asarray(value, dtype=np.uint64)
        self.set(operand, value & MASK)
        if operand.value not in (RZ, UNIFORM + 63):
            self.set(operand._replace(value=operand.value + 1), value >> np.uint64(32))

    def set_float(self, operand: Operand, value: Any) -> None:
        """Write a float32."""
        self.set(operand, np.asarray(value, dtype=np.float32).view(np.uint32))

    def set_predicate(self, operand: Operand, value: Any) -> None:
        """Write a predicate."""
        if operand.value & 7 != PT:
            self.p[operand.value, self.t] = value

    def _written(self, operand: Operand) -> Any:
        """All threads of a warp see a uniform register."""
        if operand.value < UNIFORM:
            return self.t
        return np.repeat(self.running.reshape(-1, 32).any(1), 32)

    def _spread(self, operand: Operand, value: Any) -> Any:
        value = (np.asarray(value) & MASK).astype(np.uint32) if np.ndim(value) else value
        if operand.value < UNIFORM or not np.ndim(value):
            return value
        # What the first thread of a warp that runs has.
        warp = self.t // 32
        first = np.searchsorted(warp, np.unique(warp))
        count = self.running.reshape(-1, 32).any(1).sum()
        if count != len(first):
            raise RuntimeError("a uniform register is written by some warps only")
        return np.repeat(value[first], 32)

    # Memory.

    def address(self, operand: Operand) -> Values:
        """Where each thread reads or writes."""
        at = np.full(len(self.t), operand.value & (2**64 - 1), dtype=np.uint64)
        for register, long, factor in operand.base:
            value = self.r[register, self.t].astype(np.uint64)
            if long and register not in (RZ, UNIFORM + 63):
                value |= self.r[register + 1, self.t].astype(np.uint64) << np.uint64(32)
            at = at + value * np.uint64(factor)
        return at if any(long for _, long, _ in operand.base) else at & MASK

    def shared_place(self, at: Values) -> Any:
        """Where in ``shared`` an address is; its upper bits number the block in its cluster."""
        at = at.astype(np.int64)
        return (at >> 24 & 255) * _SHARED + (at & 0xFFFFFF)

    def access_shared(self, at: Any, width: int) -> None:
        """Count the wavefronts of an access; each but the first makes a warp wait longer."""
        self.waves = wavefronts(self.t, at, width)
        more = self.waves / len(np.unique(self.t // 32)) - 1
        self.delay = LATENCY.get(self.code[self.at].name, LATENCY_OF_ALL_OTHERS) + more

    def touch(self, at: Values, width: int, stores: bool) -> list[tuple[Any, Any, Any]]:
        """The regions that ``at`` lies in: which threads, the region's bytes, where in them."""
        places = []
        warps = self.t.astype(np.uint64) // np.uint64(32)
        # Of the first cache, a line of 128 bytes a wavefront.
        self.waves = len(np.unique(warps << np.uint64(48) | at // np.uint64(128)))
        which = np.searchsorted(self._starts, at, side="right") - 1
        for number in np.unique(which):
            here = which == number
            region = self.memory[number] if number >= 0 else None
            offset = (at[here] - region.address).astype(np.int64) if region else None
            if region is None or offset.max() + width > len(region.data):
                raise RuntimeError(
                    f"{self.launch.kernel}: instruction {self.at} ({self.code[self.at].name}) of "
                    f"block {self.block} touches memory at {int(at[here].max()):#x}, which is no "
                    "argument's"
                )
            parts = np.minimum(np.arange(0, width + 31, 32), width - 1).astype(np.uint64)
            sectors = np.unique((at[here][:, None] + parts) // np.uint64(32))
            found = self.found.sectors.setdefault((region.host, stores), set())
            touched = set(sectors.tolist())
            if not stores and not touched <= found:
                self.delay = HOST_LATENCY if region.host else MISS_LATENCY
            found |= touched
            places.append((here, region.data, offset[:, None] + np.arange(width)))
        return places


def wavefronts(threads: Any, at: Any, width: int) -> int:
    """Of an access to shared memory, by half warps if a thread has 8 bytes, by quarters if 16: in
    each, a bank of 4 bytes gives one word, to all who ask.
    """
    words = at[:, None] // 4 + np.arange(max(1, width // 4))
    part = np.unique(threads * max(4, width) // 128, return_inverse=True)[1]
    asked = np.unique(part[:, None] << 32 | words)
    banks = np.bincount((asked >> 32) * 32 + asked % 32, minlength=32 * (part.max() + 1))
    return int(banks.reshape(-1, 32).max(1).sum())


def signed(value: Values) -> Any:
    """32 bits as a signed number."""
    return (value & MASK).astype(np.uint32).view(np.int32).astype(np.int64)


def handler_of(each: Instruction) -> Callable[[Machine, Instruction], None]:
    """What an instruction does."""
    from tests.kernels.timing.opcodes import HANDLERS

    def unknown(machine: Machine, each: Instruction) -> None:
        raise NotImplementedError(f"{each.name}.{'.'.join(each.mods)} {each.operands}")

    return HANDLERS.get(each.name, unknown)
