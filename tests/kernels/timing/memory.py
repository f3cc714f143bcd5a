"""Loads, stores and atomic operations."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.kernels.timing.code import RZ, Instruction
from tests.kernels.timing.costs import CLUSTER_LATENCY, LATENCY
from tests.kernels.timing.machine import MASK, SHARED_WINDOW, Machine

__all__ = ["MEMORY"]


def _width(i: Instruction) -> int:
    for mod, width in (("U8", 1), ("S8", 1), ("U16", 2), ("S16", 2), ("64", 8), ("128", 16)):
        if mod in i.mods:
            return width
    return 4


def _places(m: Machine, i: Instruction, operand: Any, width: int, stores: bool) -> Any:
    """Which threads, the memory that theirs lies in, and the indices of its bytes."""
    at = m.address(operand)
    if i.name in ("LDS", "STS", "ATOMS"):
        m.access_shared(m.shared_place(at), width)
        return [(slice(None), m.shared, m.shared_place(at)[:, None] + np.arange(width))]
    if i.name in ("LDL", "STL"):
        offset = at.astype(np.int64) % m.local.shape[1] + m.t * m.local.shape[1]
        return [(slice(None), m.local.reshape(-1), offset[:, None] + np.arange(width))]
    if i.name in ("LD", "ST", "ATOM") and (at >> np.uint64(32) == SHARED_WINDOW).any():
        # Of this block or another one of the cluster.
        m.delay = CLUSTER_LATENCY
        return [(slice(None), m.shared, m.shared_place(at)[:, None] + np.arange(width))]
    return m.touch(at, width, stores)


def _matrices(m: Machine, i: Instruction) -> None:
    """A matrix has a row of 16 bytes from each of eight threads; its numbers are 0 here."""
    count, every = int(i.mods[-1]) if i.mods[-1].isdigit() else 1, m.t
    m.t = every[every % 32 < 8 * count]
    m.access_shared(m.shared_place(m.address(next(o for o in i.operands if o.kind == "["))), 16)
    for register in i.writes:
        m.r[register, every] = 0


def _load(m: Machine, i: Instruction) -> None:
    to = next(o for o in i.operands if o.kind == "R")
    width = _width(i)
    found = np.zeros((len(m.t), max(4, width)), dtype=np.uint8)
    operand = next(o for o in i.operands if o.kind == "[")
    for threads, data, at in _places(m, i, operand, width, False):
        found[threads, :width] = data[at]
    if "S8" in i.mods or "S16" in i.mods:
        negative = found[:, width - 1] >= 128
        found[negative, width:] = 255
    words = found.view(np.uint32)
    for number in range(words.shape[1]):
        if to.value != RZ:
            m.set(to._replace(value=to.value + number), words[:, number].astype(np.uint64))


def _store(m: Machine, i: Instruction) -> None:
    to, value = i.operands[0], i.operands[1]
    width = _width(i)
    words = np.zeros((len(m.t), max(1, width // 4)), dtype=np.uint32)
    for number in range(words.shape[1]):
        each = value if value.value == RZ else value._replace(value=value.value + number)
        words[:, number] = (m.u(each) & MASK).astype(np.uint32)
    for threads, data, at in _places(m, i, to, width, True):
        data[at] = words[threads].view(np.uint8)[:, :width]


def _atomic(m: Machine, i: Instruction) -> None:
    at = next(n for n, o in enumerate(i.operands) if o.kind == "[")
    out = next((o for o in i.operands[:at] if o.kind == "R"), None)
    wide = 8 if "64" in i.mods else 4
    values = [
        m.pair(o) if wide == 8 else m.u(o) & MASK for o in i.operands[at + 1 :] if o.kind == "R"
    ]
    kind = np.int64 if wide == 8 else np.int32
    old = np.zeros(len(m.t), dtype=np.uint64)
    for threads, data, where in _places(m, i, i.operands[at], wide, True):
        view = data
        numbers = np.arange(len(m.t))[threads]
        for thread, place in zip(numbers.tolist(), where[:, 0].tolist(), strict=True):
            cell = view[place : place + wide].view(np.uint64 if wide == 8 else np.uint32)
            before = int(cell[0])
            given = [int(v[thread]) for v in values]
            cell[0] = _changed(i, before, given, kind) & (2 ** (8 * wide) - 1)
            old[thread] = before
    if out is not None and wide == 4:
        m.set(out, old)
    elif out is not None:
        m.set_pair(out, old)


def _changed(i: Instruction, before: int, given: list[int], kind: Any) -> int:
    def number(value: int) -> int:
        bits = 64 if kind is np.int64 else 32
        is_signed = any(mod in i.mods for mod in ("S32", "S64"))
        return value - (1 << bits) if is_signed and value >> (bits - 1) else value

    if "INC" in i.mods:
        return before + 1
    if "ADD" in i.mods:
        return before + given[0]
    if "OR" in i.mods:
        return before | given[0]
    if "AND" in i.mods:
        return before & given[0]
    if "EXCH" in i.mods:
        return given[0]
    if "CAS" in i.mods:
        return given[1] if before == given[0] else before
    if "MIN" in i.mods:
        return min(number(before), number(given[0]))
    if "MAX" in i.mods:
        return max(number(before), number(given[0]))
    raise NotImplementedError(f"{i.name}.{'.'.join(i.mods)}")


def _copy(m: Machine, i: Instruction) -> None:
    """From global to shared memory, without a register."""
    to, source = i.operands[:2]
    width = _width(i)
    bytes_ = np.zeros((len(m.t), width), dtype=np.uint8)
    for threads, data, at in m.touch(m.address(source), width, False):
        bytes_[threads] = data[at]
    place = m.shared_place(m.address(to))[:, None] + np.arange(width)
    m.shared[place] = bytes_
    warps = np.unique(m.t // 32)
    m.copies[warps] = np.maximum(m.copies[warps], m.time[warps] + (m.delay or LATENCY["LDG"]))


def _close(m: Machine, i: Instruction) -> None:
    for warp in np.unique(m.t // 32):
        m.groups[warp].append(float(m.copies[warp]))


def _wait(m: Machine, i: Instruction) -> None:
    left = i.operands[-1].value if len(i.operands) > 1 else 0
    for warp in np.unique(m.t // 32):
        done = m.groups[warp][: len(m.groups[warp]) - left]
        m.time[warp] = max(m.time[warp], *done) if done else m.time[warp]
        m.groups[warp] = m.groups[warp][len(done) :]


def _constant(m: Machine, i: Instruction) -> None:
    width = _width(i)
    words = m.constant(i.operands[1], width)
    to = i.operands[0]
    for number in range(max(1, width // 4)):
        m.set(to._replace(value=to.value + number), words[:, number].astype(np.uint64))


MEMORY = {
    **dict.fromkeys(("LDG", "LD", "LDS", "LDL"), _load),
    **dict.fromkeys(("STG", "ST", "STS", "STL"), _store),
    **dict.fromkeys(("ATOMS", "ATOMG", "ATOM", "RED", "REDG"), _atomic),
    **dict.fromkeys(("LDSM", "STSM"), _matrices),
    "LDGSTS": _copy, "LDGDEPBAR": _close, "DEPBAR": _wait, "LDC": _constant,
}  # fmt: skip
