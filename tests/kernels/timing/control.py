"""Control flow, barriers and what the threads of a warp tell each other."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.kernels.timing.code import UNIFORM, Instruction, Operand
from tests.kernels.timing.costs import BARRIER, CLUSTER_LATENCY
from tests.kernels.timing.machine import _WAITS, MASK, SHARED_WINDOW, Machine

__all__ = ["CONTROL"]

#: What a thread waits for at the barriers of its block and its cluster.
_BLOCK, _CLUSTER = 16, 17


def _bra(m: Machine, i: Instruction) -> None:
    if "DIV" in i.mods:
        # To code for warps whose threads are not together, as they always are here.
        return
    taken = m.t
    for condition in i.operands:
        if condition.kind == "P":
            taken = taken[m.p[condition.value, taken] ^ condition.inverted]
    m.pc[taken] = i.target


def _brx(m: Machine, i: Instruction) -> None:
    """Through a table of places in the kernel."""
    number = int(re.match(r"U?R(\d+)", i.operands[0].text)[1])
    m.pc[m.t] = m.r[number + UNIFORM * (i.name == "BRXU"), m.t] // 16


def _call(m: Machine, i: Instruction) -> None:
    m.pc[m.t] = i.target


def _ret(m: Machine, i: Instruction) -> None:
    m.pc[m.t] = m.r[i.operands[0].value, m.t] // 16


def _exit(m: Machine, i: Instruction) -> None:
    m.exited[m.t] = True
    m.pc[m.t] = 2 * _WAITS
    m.member[:, m.t] = False
    for barrier in np.unique(m.waiting[m.waiting >= 0]):
        (_release_blocks if barrier >= _BLOCK else _release)(m, int(barrier))


def _number(operand: Operand) -> int:
    return int(operand.text[1:])


def _bssy(m: Machine, i: Instruction) -> None:
    m.member[_number(i.operands[0]), m.t] = True


def _bsync(m: Machine, i: Instruction) -> None:
    barrier = _number(i.operands[0])
    m.resume[m.t] = m.at + 1
    m.pc[m.t] = _WAITS
    m.waiting[m.t] = barrier
    _release(m, barrier)


def _break(m: Machine, i: Instruction) -> None:
    barrier = _number(next(o for o in i.operands if o.kind == "B"))
    m.member[barrier, m.t] = False
    _release(m, barrier)


def _release(m: Machine, barrier: int) -> None:
    """Let the threads of warps go on whose members have all arrived."""
    waits = m.waiting == barrier
    late = (m.member[barrier] & ~waits).reshape(-1, 32).any(1)
    free = waits & ~np.repeat(late, 32)
    m.pc[free] = m.resume[free]
    m.waiting[free] = -1
    m.member[barrier, free] = False


def _bar(m: Machine, i: Instruction) -> None:
    if "ARV" in i.mods:
        raise NotImplementedError("BAR.ARV")
    if "RED" in i.mods:
        m.vote[m.t] = m.q(i.operands[-1])
    _wait_at(m, _BLOCK)


def _cluster_wait(m: Machine, i: Instruction) -> None:
    _wait_at(m, _CLUSTER)


def _wait_at(m: Machine, barrier: int) -> None:
    m.resume[m.t] = m.at + 1
    m.pc[m.t] = _WAITS
    m.waiting[m.t] = barrier
    _release_blocks(m, barrier)


def _release_blocks(m: Machine, barrier: int) -> None:
    """Let the blocks go on whose threads have all arrived, or all blocks of a cluster."""
    size, lasts = (m.launch.threads, BARRIER) if barrier == _BLOCK else (m.n, CLUSTER_LATENCY)
    waits, gone = (x.reshape(-1, size) for x in (m.waiting == barrier, m.exited))
    for block in np.flatnonzero((waits | gone).all(1) & waits.any(1)):
        free = np.zeros((m.n // size, size), dtype=bool)
        free[block] = waits[block]
        free = free.reshape(-1)
        m.pc[free] = m.resume[free]
        m.waiting[free] = -1
        warps = free.reshape(-1, 32).any(1)
        m.time[warps] = m.time[warps].max() + lasts
        m.result[free] = m.vote[free].any()
        m.count[free] = m.vote[free].sum()
        m.vote[free] = False


def _b2r(m: Machine, i: Instruction) -> None:
    for operand in i.operands:
        if operand.kind == "P":
            m.set_predicate(operand, m.result[m.t])
        elif operand.kind == "R":
            m.set(operand, m.count[m.t].astype(np.uint64))


def _nothing(m: Machine, i: Instruction) -> None:
    pass


def _s2r(m: Machine, i: Instruction) -> None:
    name = i.operands[1].text
    x, y, z = m.block
    lane, number = m.t % 32, m.t // m.launch.threads
    values: dict[str, Any] = {
        "SR_TID.X": m.t % m.launch.threads, "SR_LANEID": lane,
        "SR_CTAID.X": x + number, "SR_CTAID.Y": y, "SR_CTAID.Z": z,
        "SRZ": 0, "SR_CgaCtaId": number, "SR_SWINHI": SHARED_WINDOW,
        "SR_LTMASK": (1 << lane) - 1, "SR_LEMASK": (2 << lane) - 1,
        "SR_EQMASK": 1 << lane, "SR_GEMASK": (2**32 - 1) & ~((1 << lane) - 1),
        "SR_GTMASK": (2**32 - 1) & ~((2 << lane) - 1),
    }  # fmt: skip
    zeros = ("SR_TID.Y", "SR_TID.Z", "SR_VIRTUALSMID")
    found = np.broadcast_to(values.get(name, 0), m.t.shape).astype(np.uint64)
    if name not in values and name not in zeros:
        raise NotImplementedError(name)
    if i.name == "CS2R":
        m.set_pair(i.operands[0], found) if "32" not in i.mods else m.set(i.operands[0], found)
    else:
        m.set(i.operands[0], found)


def by_warp(m: Machine, values: Any) -> Any:
    """``[warps, 32]``, 0 for threads that do not run."""
    every = np.zeros(m.n, dtype=np.asarray(values).dtype)
    every[m.t] = values
    return every.reshape(-1, 32)


def _vote(m: Machine, i: Instruction) -> None:
    held = by_warp(m, m.q(i.operands[-1]))
    bits = (held.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1)
    runs = by_warp(m, np.ones(len(m.t), dtype=bool))
    every = held.any(1) if "ANY" in i.mods else (held | ~runs).all(1)
    for operand in i.operands[:-1]:
        if operand.kind == "P":
            m.set_predicate(operand, every[m.t // 32])
        else:
            m.set(operand, bits[m.t // 32])


def _shfl(m: Machine, i: Instruction) -> None:
    out, to, source, by, clamp = i.operands
    mine = np.zeros(m.n, dtype=np.uint64)
    mine[m.t] = m.u(source) & MASK
    lane, b, c = m.t % 32, m.u(by).astype(np.int64) & 31, m.u(clamp).astype(np.int64)
    segment = (c >> 8) & 31
    low, high = lane & segment, (lane & segment) | (c & 31 & ~segment)
    mode = i.mods[0]
    if mode == "UP":
        other, valid = lane - b, lane - b >= high
    elif mode == "DOWN":
        other, valid = lane + b, lane + b <= high
    elif mode == "BFLY":
        other, valid = lane ^ b, (lane ^ b) <= high
    else:
        other = low | (b & ~segment)
        valid = other <= high
    other = np.where(valid, other, lane)
    m.set_predicate(out, valid)
    m.set(to, mine[(m.t // 32) * 32 + other])


def _redux(m: Machine, i: Instruction) -> None:
    values = m.s(i.operands[1]) if "S32" in i.mods else m.u(i.operands[1]).astype(np.int64)
    how = {"SUM": np.add, "MIN": np.minimum, "MAX": np.maximum, "OR": np.bitwise_or}
    name = next((mod for mod in i.mods if mod in how), "SUM")
    warp = m.t // 32
    first = np.searchsorted(warp, np.unique(warp))
    found = how[name].reduceat(values, first)
    m.set(i.operands[0], found[np.searchsorted(np.unique(warp), warp)].view(np.uint64))


def _r2ur(m: Machine, i: Instruction) -> None:
    """Of a warp's first thread. A predicate says which threads have another value."""
    *others, to, source = i.operands
    value = m.u(source) & MASK
    m.set(to, value)
    for other in others:
        m.set_predicate(other, m.r[to.value, m.t] != value)


def _elect(m: Machine, i: Instruction) -> None:
    chosen = np.zeros(len(m.t), dtype=bool)
    chosen[np.unique(m.t // 32, return_index=True)[1]] = True
    m.set_predicate(i.operands[0], chosen)


CONTROL = {
    "BRA": _bra, "BRX": _brx, "BRXU": _brx, "CALL": _call, "RET": _ret, "EXIT": _exit,
    "BSSY": _bssy, "BSYNC": _bsync, "BREAK": _break, "BAR": _bar, "B2R": _b2r,
    "UCGABAR_WAIT": _cluster_wait,
    **dict.fromkeys(
        ("NOP", "WARPSYNC", "YIELD", "MEMBAR", "ERRBAR", "CCTL", "FENCE", "NANOSLEEP",
         "WARPGROUP", "CGAERRBAR", "ENDCOLLECTIVE", "ACQBULK", "PREEXIT",
         "UCGABAR_ARV"), _nothing
    ),
    **dict.fromkeys(("S2R", "S2UR", "CS2R"), _s2r),
    **dict.fromkeys(("VOTE", "VOTEU"), _vote), "SHFL": _shfl, "REDUX": _redux, "R2UR": _r2ur,
    "ELECT": _elect,
}  # fmt: skip
