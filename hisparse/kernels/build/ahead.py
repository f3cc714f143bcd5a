"""Builds kernels before they are called, so that no request waits for a compiler."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from hisparse.kernels.build.compiler import CannotBuildError
from hisparse.kernels.build.cpu import build_cpu, cpu_library
from hisparse.kernels.build.cuda import build_cuda, device_arch


def build_kernels(device: str) -> None:
    """Build what a server on ``device``, such as "cpu" or "cuda", calls.

    Without a library PyTorch's operators do its work, so a failure is a warning.

    Raises:
        ConfigError: ``HISPARSE_CPU_ISA`` names what this processor lacks.
    """
    if device == "cuda":
        build_all()
    else:
        cpu_library()


class Built(NamedTuple):
    """A library, or one line that says why there is none."""

    path: Path | None = None
    why_not: str = ""


def build_all(archs: Sequence[str] = ()) -> dict[str, Built]:
    """Build all libraries ahead of time: "cpu", and "cuda sm_XX" for each of ``archs``.

    Args:
        archs: such as "sm_90"; that of the current device, if there is one, when empty.

    Returns:
        Each library by name.
    """
    if not archs and torch.cuda.is_available():
        archs = [device_arch()]
    builds: dict[str, Callable[[], Path]] = {"cpu": build_cpu}
    builds |= {f"cuda {arch}": functools.partial(build_cuda, arch) for arch in archs}
    built: dict[str, Built] = {}
    for name, build in builds.items():
        try:
            built[name] = Built(build())
        except (ImportError, OSError, CannotBuildError) as error:
            built[name] = Built(why_not=str(error))
    return built
