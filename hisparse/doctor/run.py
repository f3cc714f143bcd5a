"""Runs the checks, those that wait for other processes at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from hisparse.doctor import hooks, kernels, machine, software
from hisparse.doctor.check import Check
from hisparse.errors import one_line

__all__ = ["run_checks"]

_Look = Callable[[], list[Check]]

_LOOKS: tuple[_Look, ...] = (
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
    kernels.adapters,
    software.optional_packages,
)


def run_checks(looks: Sequence[_Look] = _LOOKS) -> list[Check]:
    """Every finding, in a fixed order; what a look raises is a finding too."""
    with ThreadPoolExecutor(len(looks)) as pool:
        return [check for found in pool.map(_guarded, looks) for check in found]


def _guarded(look: _Look) -> list[Check]:
    try:
        return look()
    except Exception as error:
        name = look.__name__.replace("_", " ")
        remedy = "a broken package, or a bug of hisparse: please report it"
        return [Check(name=name, status="error", message=one_line(error), remedy=remedy)]
