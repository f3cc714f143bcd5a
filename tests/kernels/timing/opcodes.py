"""What each opcode of sm_90 does to integers, predicates, memory and control flow."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tests.kernels.timing.code import RZ, Instruction
from tests.kernels.timing.control import CONTROL
from tests.kernels.timing.machine import MASK, Machine, Values, signed
from tests.kernels.timing.memory import MEMORY

__all__ = ["HANDLERS"]

_32, _1 = np.uint64(32), np.uint64(1)
Handler = Callable[[Machine, Instruction], None]


def _wide(x: Values) -> Values:
    """A signed 32-bit number with 64 bits."""
    return signed(x).view(np.uint64)


def _mov(m: Machine, i: Instruction) -> None:
    m.set(i.operands[0], m.u(i.operands[1]) & MASK)


def _imad(m: Machine, i: Instruction) -> None:
    ops = [o for o in i.operands[1:] if o.kind != "P"]
    carries = [o for o in i.operands[1:] if o.kind == "P"]
    a, b = (m.u(o) & MASK for o in ops[:2])
    if "WIDE" in i.mods or "HI" in i.mods:
        if "U32" not in i.mods:
            a, b = _wide(a), _wide(b)
        total = a * b
        added = m.pair(ops[2])
        total = total + added
        if carries and i.operands[1].kind == "P":
            m.set_predicate(carries[0], total < added)
        if "WIDE" in i.mods:
            m.set_pair(i.operands[0], total)
        else:
            m.set(i.operands[0], total >> _32)
        return
    total = a * b + m.u(ops[2])
    if "X" in i.mods:
        total = total + m.q(carries[-1]).astype(np.uint64)
    m.set(i.operands[0], total)


def _iadd3(m: Machine, i: Instruction) -> None:
    if "64" in i.mods:
        m.set_pair(i.operands[0], sum(m.pair(o) for o in i.operands[1:] if o.kind != "P"))
        return
    at = 1
    while i.operands[at].kind == "P":
        at += 1
    outs, ins = i.operands[1:at], [o for o in i.operands[at:] if o.kind == "P"]
    total = sum(m.u(o) for o in i.operands[at:] if o.kind != "P")
    if "X" in i.mods:
        for carry in ins:
            total = total + m.q(carry).astype(np.uint64)
    m.set(i.operands[0], total)
    for number, out in enumerate(outs, 1):
        m.set_predicate(out, total >> _32 >= number)


def _viadd(m: Machine, i: Instruction) -> None:
    m.set(i.operands[0], m.u(i.operands[1]) + m.u(i.operands[2]))


def _lea(m: Machine, i: Instruction) -> None:
    ops = list(i.operands[1:])
    out = ops.pop(0) if ops[0].kind == "P" else None
    carry = m.q(ops.pop()).astype(np.uint64) if ops[-1].kind == "P" else np.uint64(0)
    shift = np.uint64(ops.pop().value)
    a, b = m.u(ops[0]) & MASK, m.u(ops[1])
    if "SX32" in i.mods:
        part = (_wide(a) << shift) >> _32
    elif "HI" in i.mods:
        part = ((((m.u(ops[2]) & MASK) << _32) | a) << shift) >> _32
    else:
        part = a << shift
    total = (part & MASK) + b + carry
    m.set(i.operands[0], total)
    if out is not None:
        m.set_predicate(out, total >> _32 >= 1)


def _lut(table: int, a: Values, b: Values, c: Values) -> Values:
    total = np.zeros_like(a)
    for bits in range(8):
        if table >> bits & 1:
            x, y, z = (v if bits & at else ~v for v, at in zip((a, b, c), (4, 2, 1), strict=True))
            total |= x & y & z
    return total


def _lop3(m: Machine, i: Instruction) -> None:
    ops = list(i.operands)
    out = ops.pop(0) if ops[0].kind == "P" else None
    value = _lut(ops[4].value, *(m.u(o) & MASK for o in ops[1:4])) & MASK
    m.set(ops[0], value)
    if out is not None:
        m.set_predicate(out, value != 0)


def _plop3(m: Machine, i: Instruction) -> None:
    ops = i.operands
    given = [m.q(o) for o in ops[2:5]]
    for out, table in zip(ops[:2], ops[5:7], strict=True):
        m.set_predicate(out, _lut(table.value, *given))


def _shf(m: Machine, i: Instruction) -> None:
    low, by, high = (m.u(o) & MASK for o in i.operands[1:4])
    by = by & np.uint64(31) if "W" in i.mods else np.minimum(by, np.uint64(63))
    both = (high << _32) | low
    if "L" in i.mods:
        value = (both << by) >> _32 if "HI" in i.mods else low << by
    elif "S32" in i.mods or "S64" in i.mods:
        value = (both.view(np.int64) >> by.astype(np.int64)).view(np.uint64)
        if "HI" in i.mods:
            value = (signed(high) >> np.minimum(by, np.uint64(31)).astype(np.int64)).view(np.uint64)
    else:
        value = high >> by if "HI" in i.mods else both >> by
    m.set(i.operands[0], value)


def _prmt(m: Machine, i: Instruction) -> None:
    low, selector, high = (m.u(o) & MASK for o in i.operands[1:4])
    both, value = (high << _32) | low, np.zeros_like(low)
    for at in range(4):
        pick = (selector >> np.uint64(4 * at)) & np.uint64(15)
        byte = (both >> ((pick & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        value |= np.where(pick & np.uint64(8), sign, byte) << np.uint64(8 * at)
    m.set(i.operands[0], value)


def _sel(m: Machine, i: Instruction) -> None:
    a, b = m.u(i.operands[1]), m.u(i.operands[2])
    m.set(i.operands[0], np.where(m.q(i.operands[3]), a, b) & MASK)


def _compare(name: str, a: Values, b: Values) -> Values:
    if name in ("T", "F"):
        return np.full(len(a), name == "T")
    with np.errstate(invalid="ignore"):
        return {
            "LT": a < b, "LE": a <= b, "GT": a > b, "GE": a >= b, "EQ": a == b, "NE": a != b,
        }[name]  # fmt: skip


def _combine(m: Machine, i: Instruction, holds: Values) -> None:
    given = m.q(i.operands[4])
    for out, value in zip(i.operands[:2], (holds, ~holds), strict=True):
        how = {"AND": np.logical_and, "OR": np.logical_or, "XOR": np.logical_xor}
        name = next(mod for mod in i.mods if mod in how)
        m.set_predicate(out, how[name](value, given))


def _isetp(m: Machine, i: Instruction) -> None:
    a, b = (m.u(o) & MASK for o in i.operands[2:4])
    if "U32" not in i.mods:
        a, b = signed(a), signed(b)
    holds = _compare(i.mods[0], a, b)
    if "EX" in i.mods:
        low, equal = m.q(i.operands[5]), a == b
        if i.mods[0] == "NE":
            holds = holds | low
        else:
            strict = i.mods[0].replace("GE", "GT").replace("LE", "LT")
            holds = equal & low if strict == "EQ" else _compare(strict, a, b) | (equal & low)
    _combine(m, i, holds)


def _fsetp(m: Machine, i: Instruction) -> None:
    a, b = m.f(i.operands[2]), m.f(i.operands[3])
    nan, name = np.isnan(a) | np.isnan(b), i.mods[0]
    if name in ("NAN", "NUM"):
        holds = nan if name == "NAN" else ~nan
    else:
        # A comparison with "U" holds for NaN, too.
        holds = np.where(nan, len(name) == 3, _compare(name[:2], a, b))
    _combine(m, i, holds)


def _minmax(m: Machine, i: Instruction) -> None:
    *values, last = i.operands[1:]
    if i.name == "VIMNMX3":
        _minmax_of_three(m, i)
        return
    if i.name == "VIADDMNMX":
        a, b = m.u(values[0]) + m.u(values[1]), m.u(values[2])
    else:
        a, b = m.u(values[0]), m.u(values[1])
    a, b = (a & MASK, b & MASK) if "U32" in i.mods else (signed(a), signed(b))
    value = np.where(m.q(last), np.minimum(a, b), np.maximum(a, b))
    if "RELU" in i.mods:
        value = np.maximum(value, 0)
    m.set(i.operands[0], value.astype(np.int64).view(np.uint64))


def _minmax_of_three(m: Machine, i: Instruction) -> None:
    values = [m.u(o) & MASK if "U32" in i.mods else m.s(o) for o in i.operands[1:4]]
    low, high = np.minimum.reduce(values), np.maximum.reduce(values)
    value = np.where(m.q(i.operands[4]), low, high)
    m.set(i.operands[0], value.astype(np.int64).view(np.uint64))


def _iabs(m: Machine, i: Instruction) -> None:
    m.set(i.operands[0], np.abs(m.s(i.operands[1])).view(np.uint64))


def _popc(m: Machine, i: Instruction) -> None:
    m.set(i.operands[0], np.bitwise_count(m.u(i.operands[1]) & MASK).astype(np.uint64))


def _sgxt(m: Machine, i: Instruction) -> None:
    bits = m.u(i.operands[2]) & np.uint64(31)
    value = m.u(i.operands[1]) & ((_1 << bits) - _1)
    if "U32" not in i.mods:
        sign = (value >> (bits - _1)) & _1
        value = np.where(sign == 1, value | (MASK ^ ((_1 << bits) - _1)), value)
    m.set(i.operands[0], value)


def _no(m: Machine, i: Instruction) -> None:
    """A comparison of half numbers, or whether a division of floats needs the slow way."""
    for out in i.operands[: 2 if i.name == "HSETP2" else 1]:
        m.set_predicate(out, np.zeros(len(m.t), dtype=bool))


def _flo(m: Machine, i: Instruction) -> None:
    value = m.u(i.operands[1]) & MASK
    if "U32" not in i.mods:
        value = np.where(value >> np.uint64(31), ~value & MASK, value)
    top = np.floor(np.log2(np.maximum(value, 1).astype(np.float64))).astype(np.int64)
    found = 31 - top if "SH" in i.mods else top
    m.set(i.operands[0], np.where(value == 0, -1, found).view(np.uint64))


def _brev(m: Machine, i: Instruction) -> None:
    value, total = m.u(i.operands[1]) & MASK, np.uint64(0)
    for bit in range(32):
        total = total | (((value >> np.uint64(bit)) & _1) << np.uint64(31 - bit))
    m.set(i.operands[0], total)


def _r2p(m: Machine, i: Instruction) -> None:
    value = m.u(i.operands[1])
    for bit in range(7):
        if i.operands[2].value >> bit & 1:
            m.p[bit, m.t] = (value >> np.uint64(bit)) & _1


def _p2r(m: Machine, i: Instruction) -> None:
    value = m.u(i.operands[2]) & np.uint64(~i.operands[3].value & 0xFFFFFFFF)
    for bit in range(7):
        if i.operands[3].value >> bit & 1:
            value = value | (m.p[bit, m.t].astype(np.uint64) << np.uint64(bit))
    m.set(i.operands[0], value)


def _i2f(m: Machine, i: Instruction) -> None:
    if "U64" in i.mods or "S64" in i.mods:
        value = m.pair(i.operands[1])
        value = value.view(np.int64) if "S64" in i.mods else value
    else:
        value = m.u(i.operands[1]) & MASK
        unsigned = any(mod.startswith("U") for mod in i.mods)
        value = value if unsigned else signed(value)
    m.set_float(i.operands[0], _rounded(value.astype(np.float64), i.mods))


def _f2i(m: Machine, i: Instruction) -> None:
    value = np.nan_to_num(m.f(i.operands[1]).astype(np.float64))
    value = np.trunc(value) if "TRUNC" in i.mods else np.rint(value)
    if "U64" in i.mods:
        m.set_pair(i.operands[0], np.clip(value, 0, 2**63).astype(np.uint64))
    elif "U32" in i.mods:
        m.set(i.operands[0], np.clip(value, 0, 2**32 - 1).astype(np.uint64))
    else:
        m.set(i.operands[0], np.clip(value, -(2**31), 2**31 - 1).astype(np.int64).view(np.uint64))


def _mufu(m: Machine, i: Instruction) -> None:
    x = m.f(i.operands[1])
    with np.errstate(all="ignore"):
        found = {
            "RCP": lambda: np.float32(1) / x, "EX2": lambda: np.exp2(x), "LG2": lambda: np.log2(x),
            "RSQ": lambda: 1 / np.sqrt(x), "SQRT": lambda: np.sqrt(x), "TANH": lambda: np.tanh(x),
            "SIN": lambda: np.sin(x), "COS": lambda: np.cos(x),
        }[i.mods[0]]()  # fmt: skip
    m.set_float(i.operands[0], found)


def _float(m: Machine, i: Instruction) -> None:
    a, b, *more = (m.f(o).astype(np.float64) for o in i.operands[1:] if o.kind != "P")
    with np.errstate(all="ignore"):
        if i.name == "FMNMX":
            value = np.where(m.q(i.operands[3]), np.fmin(a, b), np.fmax(a, b))
        else:
            value = a + b if i.name == "FADD" else a * b + (more[0] if more else 0.0)
        if "SAT" in i.mods:
            value = np.clip(np.nan_to_num(value, nan=0.0), 0.0, 1.0)
        m.set_float(i.operands[0], _rounded(value, i.mods))


def _rounded(value: Values, mods: tuple[str, ...]) -> Values:
    """To float32; down with RM, up with RP, else to the nearest."""
    found = value.astype(np.float32)
    if "RM" in mods:
        return np.where(found > value, np.nextafter(found, np.float32(-np.inf)), found)
    if "RP" in mods:
        return np.where(found < value, np.nextafter(found, np.float32(np.inf)), found)
    return found


def _half2(m: Machine, i: Instruction) -> None:
    """Compilers write constants so: 0 times 0, and two float16 numbers, the higher one first."""
    if [o.value for o in i.operands[1:3]] != [RZ, RZ] or i.operands[3].kind != "#":
        _zero(m, i)
        return
    high, low = (_half(o.text) for o in i.operands[3:5])
    m.set(i.operands[0], np.full(len(m.t), high << 16 | low, dtype=np.uint64))


def _half(text: str) -> int:
    number = float(text.replace("QNAN", "nan").replace("INF", "inf"))
    return int(np.float16(number).view(np.uint16))


def _zero(m: Machine, i: Instruction) -> None:
    """What no control flow depends on."""
    for register in i.writes:
        if register < 320:
            m.r[register, m.t] = 0


HANDLERS: Mapping[str, Handler] = {
    **CONTROL,
    **MEMORY,
    **dict.fromkeys(("MOV", "UMOV"), _mov),
    "IMAD": _imad, "IADD3": _iadd3, "VIADD": _viadd, "LEA": _lea, "LOP3": _lop3, "PLOP3": _plop3,
    "SHF": _shf, "PRMT": _prmt, "SEL": _sel, "FSEL": _sel, "ISETP": _isetp, "FSETP": _fsetp,
    **dict.fromkeys(("IMNMX", "VIMNMX", "VIMNMX3", "VIADDMNMX"), _minmax),
    "IABS": _iabs, "POPC": _popc, "FLO": _flo, "BREV": _brev, "SGXT": _sgxt, "FCHK": _no,
    "HSETP2": _no,
    "R2P": _r2p, "P2R": _p2r,
    **dict.fromkeys(("I2F", "I2FP"), _i2f), "F2I": _f2i, "MUFU": _mufu,
    "HFMA2": _half2,
    **dict.fromkeys(("FADD", "FMUL", "FFMA", "FMNMX"), _float),
    **dict.fromkeys(
        ("HMMA", "HGMMA", "IMMA", "HMUL2", "HADD2", "HMNMX2", "F2F", "F2FP", "HSET2"), _zero
    ),
}  # fmt: skip
