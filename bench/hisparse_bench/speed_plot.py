"""The README's plot of decode speed.

``python -m hisparse_bench.speed_plot RESULT.json [RESULT.json ...] OUT.svg`` draws the output of
``hisparse bench decode --json``, a group of rows for each file. ``make docs`` runs it on committed
results.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from hisparse.errors import ConfigError, HiSparseError, one_line
from hisparse.eval.svg_chart import Axis, Chart, Color
from hisparse.options import check_fields, read_object

__all__ = ["draw", "main"]

#: Implementation to its label and colour (Okabe and Ito's); "cpu" is hisparse with an algorithm.
_IMPLS: dict[str, tuple[str, Color]] = {
    "torch_native": ("SGLang torch_native, dense", "#8c8c8c"),
    "sdpa": ("PyTorch SDPA, dense", "#0072b2"),
    "cpu": ("hisparse, {algorithm}", "#d55e00"),
}
_LABELS, _LEFT, _RIGHT, _VALUES = 24, 230, 690, 700
_TOP, _ROW, _GAP = 66, 20, 34
_TICKS_MS = (1, 3, 10, 30, 100, 300)


class _Timing(TypedDict):
    impl: str
    median_us: float
    p10_us: float
    p90_us: float


class _Case(TypedDict):
    name: str
    params: dict[str, Any]
    gate: str
    results: list[_Timing]


class _Report(TypedDict):
    command: Literal["bench decode"]
    machine: str
    commit: str
    cases: list[_Case]


def draw(reports: Sequence[dict[str, Any]]) -> str:
    """The plot as SVG: median time of each implementation, with p10 to p90.

    Args:
        reports: objects that ``hisparse bench decode --json`` printed.

    Raises:
        ConfigError: the reports have different machines or commits, or a gate failed.
    """
    sources = sorted({f"{report['machine']}, commit {report['commit'][:7]}" for report in reports})
    if len(sources) != 1:
        raise ConfigError(f"got reports of {'; '.join(sources)}; expected one machine and commit")
    cases = [case | {"kernels": _kernels(x)} for x in reports for case in x["cases"]]
    if failed := [case["name"] for case in cases if case["gate"] != "passed"]:
        raise ConfigError(f"the gate of {failed[0]!r} failed; expected reports that passed")
    bottom = _TOP + len(cases) * (_GAP + len(_IMPLS) * _ROW) - 16
    chart = Chart(width=800, height=bottom + 76, title="Decode attention: median time")
    chart.text(24, 30, "Attention of one layer in one decode step", size=16, bold=True)
    x = Axis(low=0.8, high=400, start=_LEFT, end=_RIGHT, log=True)
    chart.grid_x(x, [(ms, f"{ms} ms") for ms in _TICKS_MS], (_TOP - 18, bottom))
    y = float(_TOP)
    for case in cases:
        chart.text(_LABELS, y, _heading(case["params"]) + case["kernels"], bold=True)
        _draw_rows(chart, x, y, case)
        y += _GAP + len(_IMPLS) * _ROW
    chart.text(24, bottom + 42, _shapes(cases[0]["params"]), size=11)
    dots = "Dots: medians. Lines: p10 to p90. Logarithmic axis."
    chart.text(24, bottom + 60, f"{sources[0]}. {dots}", size=11)
    return chart.to_svg()


def _kernels(report: dict[str, Any]) -> str:
    """The kernels that ran, for a heading; older reports do not say."""
    found = report.get("instruction_sets")
    return f"; {found['kernels']} kernels" if found else ""


def _heading(params: dict[str, Any]) -> str:
    missing = params["miss_ratio"]
    where = f"{missing:.0%} of the selected pages read from host" if missing else "all resident"
    return f"{params['context']:,} tokens of context, {params['dtype']}; {where}"


def _shapes(params: dict[str, Any]) -> str:
    return (
        f"{params['batch']} request, {params['q_heads']} query heads and {params['kv_heads']} "
        f"KV heads x {params['head_dim']}, {params['threads']} threads; hisparse attends "
        f"{params['budget']:,} tokens; its time includes selection and transfers."
    )


def _draw_rows(chart: Chart, x: Axis, top: float, case: dict[str, Any]) -> None:
    by_impl = {result["impl"]: result for result in case["results"]}
    for row, (impl, (label, color)) in enumerate(_IMPLS.items(), 1):
        y = top + row * _ROW
        p10, median, p90 = (by_impl[impl][f"{name}_us"] / 1e3 for name in ("p10", "median", "p90"))
        chart.text(_LABELS, y + 4, label.format(algorithm=case["params"]["algorithm"]))
        chart.line([(x(p10), y), (x(p90), y)], color=color, width=2)
        chart.dot(x(median), y, color)
        chart.text(_VALUES, y + 4, _milliseconds(median))


def _milliseconds(value: float) -> str:
    """Format with three significant digits."""
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} ms"


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw all files but the last into the last; return the exit code."""
    names = sys.argv[1:] if arguments is None else arguments
    if len(names) < 2:
        print("usage: python -m hisparse_bench.speed_plot RESULT.json ... OUT.svg", file=sys.stderr)
        return 2
    try:
        svg = draw([_read(Path(name)) for name in names[:-1]])
    except HiSparseError as error:
        print(f"hisparse: error: {error}", file=sys.stderr)
        return 1
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        # A report may have the right types and still be none that a benchmark printed.
        print(f"hisparse: error: a report contradicts itself: {one_line(error)}", file=sys.stderr)
        return 1
    Path(names[-1]).write_text(svg, encoding="utf-8")
    return 0


def _read(file: Path) -> dict[str, Any]:
    report = read_object(file, "RESULT", '{"command": "bench decode", ...}')
    try:
        check_fields(f"{str(file)!r}", report, _Report)
    except ConfigError as error:
        raise ConfigError(f"{error}; expected output of `hisparse bench decode --json`") from None
    return report


if __name__ == "__main__":
    sys.exit(main())
