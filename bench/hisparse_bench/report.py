"""Results of a benchmark, as one JSON object and as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from hisparse.doctor.provenance import commit, instruction_sets, machine, now, versions


@dataclass(frozen=True, kw_only=True)
class Result:
    """Times of one implementation, microseconds.

    Attributes:
        impl: name of the implementation.
        median_us, p10_us, p90_us: over the repeats.
        gb_s: bytes moved per second / 1e9; None: it moves none to speak of.
    """

    impl: str
    median_us: float
    p10_us: float
    p90_us: float
    gb_s: float | None = None

    @classmethod
    def of(cls, impl: str, seconds: Sequence[float], moved: int | None = None) -> Result:
        """Summarise repeats, each in seconds; ``moved`` is bytes per repeat."""
        times = np.percentile(np.array(seconds) * 1e6, [10, 50, 90]).tolist()
        p10, median, p90 = map(_round, times)
        gb_s = None if moved is None else _round(moved / times[1] / 1e3)
        return cls(impl=impl, median_us=median, p10_us=p10, p90_us=p90, gb_s=gb_s)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation, timed in several implementations.

    Attributes:
        name: name of the case.
        params: sizes and other parameters.
        gate: "passed" or "failed", the outcome of the correctness check; ``results`` of a failed
            case are not shown. ``bench serve`` also has "not checked", for a running server that
            nothing is compared with: its results are shown without ratios.
        results: one per implementation.
    """

    name: str
    params: dict[str, Any]
    gate: str
    results: list[Result]

    @property
    def ratios(self) -> dict[str, float]:
        """``a/b``: a's median over b's, for every pair; none unless the gate passed."""
        if self.gate != "passed":
            return {}
        return {
            f"{a.impl}/{b.impl}": _round(a.median_us / b.median_us)
            for i, a in enumerate(self.results)
            for b in self.results[i + 1 :]
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """All cases of one run, with device, machine, versions and commit.

    Attributes:
        command: the benchmark, such as "bench decode".
        device: "cpu" or "cuda".
        cases: what was measured.
        instruction_sets: instruction set of our CPU kernels and of PyTorch.
        date, machine, versions, commit: see :mod:`hisparse.doctor.provenance`.
    """

    command: str
    device: str
    cases: list[Case]
    date: str = field(default_factory=now)
    machine: str = field(default_factory=machine)
    instruction_sets: dict[str, str] = field(default_factory=instruction_sets)
    versions: dict[str, str] = field(default_factory=versions)
    commit: str = field(default_factory=commit)

    def to_json(self) -> str:
        """The report as one JSON object."""
        found = asdict(self)
        for case, entry in zip(self.cases, found["cases"], strict=True):
            entry["ratios"] = case.ratios
            if case.gate != "passed":
                entry["results"] = []
        return json.dumps(found, indent=2)

    @property
    def title(self) -> str:
        """The command, the kernels that ran and the machine."""
        return f"{self.command}: {self._kernels()}, on {self.machine}"

    def print_table(self, console: Console) -> None:
        """Print the report as a table."""
        # Columns are narrow enough for 80 characters; names wrap and are never cut off.
        table = Table(title=self.title, box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for column in ("case", "gate", "implementation"):
            table.add_column(column, overflow="fold")
        for column in ("median", "p10", "p90", "GB/s"):
            table.add_column(column, justify="right", no_wrap=True)
        for case in self.cases:
            if case.gate != "passed":
                table.add_row(case.name, case.gate, "not shown: the check failed")
                continue
            for result in case.results:
                times = (result.median_us, result.p10_us, result.p90_us)
                speed = "" if result.gb_s is None else f"{result.gb_s:,}"
                table.add_row(case.name, case.gate, result.impl, *map(_time, times), speed)
        console.print(table)
        for case in self.cases:
            sizes = ", ".join(f"{name} {value}" for name, value in case.params.items())
            console.print(f"{case.name}: {sizes}")
            if case.ratios:
                ratios = ", ".join(f"{pair} {ratio}" for pair, ratio in case.ratios.items())
                console.print(f"{case.name}: {ratios}", highlight=False)

    def _kernels(self) -> str:
        """The kernels that ran, such as "AVX-512 kernels"."""
        if self.device == "cuda":
            return "CUDA kernels"
        ours, aten = self.instruction_sets["kernels"], self.instruction_sets["torch"]
        if ours == "none":
            return f"no C++ kernels, PyTorch with {aten}"
        return f"{ours} kernels" + ("" if ours == aten else f", PyTorch with {aten}")


def _round(value: float) -> float:
    """Four significant digits, and every digit before the point.

    A fixed number of decimals would show a low rate as 0 GB/s and change small ratios.
    """
    if value == 0 or not math.isfinite(value):
        return value
    return float(round(value, max(0, 3 - math.floor(math.log10(abs(value))))))


def _time(us: float) -> str:
    if us >= 1e6:
        return f"{us / 1e6:,.3f} s"
    return f"{us / 1000:,.2f} ms" if us >= 1000 else f"{us:,.1f} us"
