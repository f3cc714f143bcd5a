"""Machine code of sm_90 as nvdisasm prints it, taken apart."""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple

__all__ = ["Instruction", "Operand", "Program", "programs"]

#: Registers that always read as 0, and predicates that always read as true.
RZ, PT, UNIFORM = 255, 7, 256
#: Opcodes that write no register.
_WRITE_NOTHING = frozenset((
    "STG", "STS", "ST", "STL", "RED", "REDG", "BAR", "BRA", "BRX", "BRXU", "EXIT", "NOP",
    "BSSY", "BSYNC", "BREAK", "WARPSYNC", "RET", "LDGSTS", "CALL", "LDGDEPBAR", "DEPBAR",
    "MEMBAR", "ERRBAR", "CCTL", "FENCE", "ENDCOLLECTIVE", "YIELD", "NANOSLEEP", "WARPGROUP",
    "ARRIVES", "ACQBULK", "PREEXIT", "STSM", "CGAERRBAR", "UCGABAR_ARV", "UCGABAR_WAIT",
))  # fmt: skip
#: Opcodes with a "U" that are not of the uniform datapath.
_NOT_UNIFORM = frozenset(["UTMALDG", "UTMASTG", "UCGABAR_ARV", "UCGABAR_WAIT"])
#: Opcodes whose first two operands are predicates that they write.
_WRITE_PREDICATES = frozenset(["ISETP", "FSETP", "PLOP3", "HSETP2", "DSETP"])


class Operand(NamedTuple):
    """One operand.

    Attributes:
        kind: "R" a register, "P" a predicate, "#" a number, "c" the constant bank, "[" an address,
            "s" a special register, "L" a label, "B" a barrier of convergence.
        value: number of the register (of uniform ones, after the others'), the immediate, the
            offset in the bank or of the address; of "s", "L": 0.
        base: "[" and "c": the registers that are added, as (number, 64 bits, factor).
        negative, inverted, absolute: "-", "~" (of a predicate "!") and "|...|".
        text: as it stands.
    """

    kind: str
    value: int
    base: tuple[tuple[int, bool, int], ...] = ()
    negative: bool = False
    inverted: bool = False
    absolute: bool = False
    text: str = ""


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        guard: predicate that it runs under; ``PT``: always.
        unless: it runs if the guard is false.
        name, mods: ``IMAD`` and ``("WIDE", "U32")``; without the "U" of the uniform datapath.
        uniform: it runs on the uniform datapath: once for a warp.
        operands: in order.
        reads, writes: registers; predicates are numbered from 400 on, those of the uniform datapath
            from 408.
        target: instruction that its label stands for; -1: none.
    """

    guard: int
    unless: bool
    name: str
    mods: tuple[str, ...]
    uniform: bool
    operands: tuple[Operand, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    target: int


class Program(NamedTuple):
    """The instructions of a kernel, 16 bytes each, and of what it calls.

    Attributes:
        name: mangled.
        instructions: in order.
        tables: bytes of constant bank 2, the targets of jumps through tables.
    """

    name: str
    instructions: tuple[Instruction, ...]
    tables: bytes


def programs(cubin: bytes, text: str) -> Mapping[str, Callable[[], Program]]:
    """The kernels of a file by mangled name, each read when it is asked for.

    Args:
        cubin: the file.
        text: what ``nvdisasm -c`` printed of it.
    """
    sections = _sections(cubin)
    found = {}
    for part in re.split(r"^\.text\.", text, flags=re.M)[1:]:
        name, _, body = part.partition(":")
        tables = sections.get(f".nv.constant2.{name}", b"")
        found[name] = functools.cache(functools.partial(_program, name, body, tables))
    return found


def _program(name: str, body: str, tables: bytes) -> Program:
    labels: dict[str, int] = {}
    lines: list[str] = []
    for line in body.splitlines():
        if label := re.match(r"\s*([.$][\w.$]+):", line):
            labels[label[1]] = len(lines)
        elif found := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.+?)\s*;", line):
            lines.append(re.sub(r"\s*\(\*.*", "", found[1]))
        elif line.lstrip().startswith(".section"):
            break
    return Program(name, tuple(_instruction(line, labels) for line in lines), tables)


def _sections(elf: bytes) -> dict[str, bytes]:
    """Sections of an ELF file of 64 bits by name."""
    table, size, count, names = (
        *struct.unpack_from("<Q", elf, 40),
        *struct.unpack_from("<3H", elf, 58),
    )
    headers = [struct.unpack_from("<IIQQQQ", elf, table + n * size) for n in range(count)]
    strings = headers[names][4]

    def name(offset: int) -> str:
        return elf[strings + offset : elf.index(b"\0", strings + offset)].decode()

    return {name(each[0]): elf[each[4] : each[4] + each[5]] for each in headers}


def _instruction(line: str, labels: Mapping[str, int]) -> Instruction:
    guard, unless = PT, False
    if found := re.match(r"@(!?)(U?)P(\d|T)\s+(.*)", line):
        unless = found[1] == "!"
        guard = PT if found[3] == "T" else int(found[3]) + 8 * (found[2] == "U")
        line = found[4]
    opcode, _, rest = line.partition(" ")
    name, *mods = opcode.split(".")
    uniform = name[0] == "U" and name not in _NOT_UNIFORM
    operands = tuple(_operand(text) for text in _split(rest))
    if name in ("LD", "ST", "ATOM"):
        # Addresses of any memory have 64 bits.
        operands = tuple(
            o._replace(base=tuple((n, True, by) for n, _, by in o.base)) if o.kind == "[" else o
            for o in operands
        )
    target = next((labels[o.text] for o in operands if o.kind == "L" and o.text in labels), -1)
    name = name[1:] if uniform else name
    writes = _writes(name, mods, operands)
    reads = _reads(name, mods, operands, len(writes[1]))
    if guard != PT:
        reads = (*reads, 400 + guard)
    return Instruction(
        guard, unless, name, tuple(mods), uniform, operands, reads, writes[0], target
    )


def _split(rest: str) -> list[str]:
    return [part.strip() for part in re.split(r",(?![^\[]*\])", rest) if part.strip()]


def _operand(text: str) -> Operand:
    whole, negative, inverted = text.strip(), False, False
    text = re.sub(r"\.reuse|\.F32x2\.HI_LO|\.H[01]_H[01]|\.B[0-3]", "", whole)
    if label := re.match(r"`\((.*)\)", text):
        return Operand("L", 0, text=label[1])
    while text[:1] in "-~!+" and not re.match(r"[-+](\d|INF|QNAN)", text):
        negative, inverted = negative ^ (text[0] == "-"), inverted ^ (text[0] in "~!")
        text = text[1:]
    absolute = text.startswith("|")
    text = text.strip("|")
    signs = {"negative": negative, "inverted": inverted, "absolute": absolute, "text": whole}
    if found := re.match(r"(U?)P(\d|T)$", text):
        return Operand(
            "P", PT if found[2] == "T" else int(found[2]) + 8 * (found[1] == "U"), **signs
        )
    if (number := _register(text)) is not None:
        return Operand("R", number, **signs)
    if found := re.match(r"c\[(0x[0-9a-f]+)\]\s*\[(.*)\]$", text):
        base, offset = _address(found[2])
        return Operand("c", offset + (int(found[1], 16) << 20), base, **signs)
    if found := re.match(r"(?:desc\[UR\d+\])?\[(.*)\]$", text):
        base, offset = _address(found[1])
        return Operand("[", offset, base, **signs)
    if re.match(r"[-+]?0x[0-9a-f]+$", text):
        return Operand("#", int(text, 16), **signs)
    if re.match(r"[-+]?(\d|INF|QNAN)", text):
        number = float(text.replace("QNAN", "nan").replace("INF", "inf"))
        return Operand("#", int(number) if re.match(r"-?\d+$", text) else 0, **signs)
    return Operand("B" if re.match(r"B\d+$", text) else "s", 0, **signs)


def _register(text: str) -> int | None:
    found = re.match(r"(U?)R(\d+|Z)(?:\.(?:64|U32|S32|X\d+))*$", text)
    if not found:
        return None
    if found[2] == "Z":
        return UNIFORM + 63 if found[1] else RZ
    return int(found[2]) + (UNIFORM if found[1] else 0)


def _address(text: str) -> tuple[tuple[tuple[int, bool, int], ...], int]:
    base, offset = [], 0
    for part in re.findall(r"[-+]?[^-+]+", text.replace(" ", "")):
        if (number := _register(part.lstrip("+"))) is not None:
            factor = re.search(r"\.X(\d+)", part)
            base.append((number, ".64" in part, int(factor[1]) if factor else 1))
        else:
            offset += int(part, 16)
    return tuple(base), offset


def _width(name: str, mods: list[str]) -> int:
    """Registers of a result."""
    if "128" in mods:
        return 4
    if "64" in mods or "WIDE" in mods or (name == "CS2R" and "32" not in mods):
        return 2
    if name in ("HMMA", "IMMA"):
        return 4 if "F32" in mods or name == "IMMA" else 2
    if name == "HGMMA":
        return int(mods[0].split("x")[1]) // 2
    if name == "LDSM":
        return int(mods[-1]) if mods[-1].isdigit() and len(mods[-1]) == 1 else 1
    return 1


def _writes(
    name: str, mods: list[str], operands: tuple[Operand, ...]
) -> tuple[tuple[int, ...], tuple[Operand, ...]]:
    """Numbers of what is written, and the operands that name them."""
    if name in _WRITE_NOTHING or not operands:
        return (), ()
    if name in _WRITE_PREDICATES:
        count = 2
    elif name == "R2P":
        return tuple(range(400, 407)), operands[:1]
    else:
        # A predicate before the result is one more; so are those between it and the sources.
        count = next((i + 1 for i, o in enumerate(operands) if o.kind == "R"), 1)
        if name in ("IADD3", "LEA", "VOTE", "B2R") or (name == "IMAD" and "WIDE" in mods):
            while count < len(operands) - 1 and operands[count].kind == "P":
                count += 1
    found: list[int] = []
    for operand in operands[:count]:
        if operand.kind == "P":
            found.append(400 + operand.value)
        elif operand.kind == "R":
            found += range(operand.value, operand.value + _width(name, mods))
    return tuple(r for r in found if r not in (RZ, UNIFORM + 63, 407)), operands[:count]


def _reads(
    name: str, mods: list[str], operands: tuple[Operand, ...], written: int
) -> tuple[int, ...]:
    wide = _width(name, mods) if name in ("STG", "STS", "ST", "STL", "HMMA", "IMMA") else 1
    found: list[int] = []
    for operand in operands[written:]:
        if operand.kind == "P":
            found.append(400 + operand.value)
        elif operand.kind == "R":
            pair = operand is operands[-1] and name == "IMAD" and ("WIDE" in mods or "HI" in mods)
            pair |= name == "IADD3" and "64" in mods
            found += range(operand.value, operand.value + max(wide, 1 + (pair or name == "RET")))
        for register, long, _ in operand.base:
            found += range(register, register + 1 + long)
    return tuple(r for r in found if r not in (RZ, UNIFORM + 63, 407))
