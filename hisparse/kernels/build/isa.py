"""Instruction sets that the CPU kernels can be built for.

The environment variable ``HISPARSE_CPU_ISA`` names one: "native" (the default), "avx2" or "avx512".
So one machine can run the kernels of another.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hisparse.errors import ConfigError

#: Environment variable that names the instruction set.
VARIABLE = "HISPARSE_CPU_ISA"

_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


class InstructionSet(NamedTuple):
    """An instruction set."""

    march: str  # the compiler's ``-march``
    flags: frozenset[str]  # in /proc/cpuinfo of a processor that has it


ISAS: Mapping[str, InstructionSet] = {
    "native": InstructionSet("native", frozenset()),
    "avx2": InstructionSet("x86-64-v3", _V3),
    "avx512": InstructionSet("x86-64-v4", _V4),
}


def chosen_isa() -> str:
    """The instruction set that ``HISPARSE_CPU_ISA`` names; "native" if it is not set.

    Raises:
        ConfigError: there is no such instruction set, or this processor lacks it.
    """
    name, found = os.environ.get(VARIABLE) or "native", _processor_flags()
    choices = [isa for isa, (_, flags) in ISAS.items() if flags <= found]
    if name in choices:
        return name
    expected = "one that this processor has" if name in ISAS else "an instruction set"
    raise ConfigError(
        f"{VARIABLE}: got {name!r}, expected {expected} (choices: {', '.join(choices)})"
    )


def _processor_flags() -> frozenset[str]:
    """The flags of this processor; none if there is no /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2] for line in lines if line.startswith("flags"))
    return frozenset(next(found, "").split())
