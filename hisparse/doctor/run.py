"""Runs all checks in parallel, because some wait for other processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from hisparse.doctor import hooks, kernels, machine, software
from hisparse.doctor.check import Check
from hisparse.errors import one_line

_CheckFunction = Callable[[], list[Check]]

_CHECKS: tuple[_CheckFunction, ...] = (
    software.python,
    software.torch_version,
    software.sglang_version,
    software.plugin_visible,
    hooks.hooks,
    machine.device,
    machine.pinned_memory,
    machine.host_memory,
    machine.numa,
    kernels.cpu_kernels,
    kernels.cuda_kernels,
    kernels.triton_kernels,
    kernels.adapters,
    software.optional_packages,
)


def run_checks(checks: Sequence[_CheckFunction] = _CHECKS) -> list[Check]:
    """All results, in a fixed order; an exception in a check becomes an error."""
    with ThreadPoolExecutor(len(checks)) as pool:
        return [result for results in pool.map(_guarded, checks) for result in results]


def _guarded(check: _CheckFunction) -> list[Check]:
    try:
        return check()
    except Exception as error:
        name = check.__name__.replace("_", " ")
        remedy = "a broken package, or a bug of hisparse: please report it"
        return [Check(name=name, status="error", message=one_line(error), remedy=remedy)]
