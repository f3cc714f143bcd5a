"""Builds kernels before they are called, so that no request waits for a compiler."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

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


def build_all(archs: Sequence[str] = ()) -> dict[str, Path | str]:
    """Build all libraries ahead of time: "cpu", and "cuda sm_XX" for each of ``archs``.

    Args:
        archs: such as "sm_90"; that of the current device, if there is one, when empty.

    Returns:
        For each library its path, or one line that says why there is none.
    """
    if not archs and torch.cuda.is_available():
        archs = [device_arch()]
    builds: dict[str, Callable[[], Path]] = {"cpu": build_cpu}
    builds |= {f"cuda {arch}": functools.partial(build_cuda, arch) for arch in archs}
    built: dict[str, Path | str] = {}
    for name, build in builds.items():
        try:
            built[name] = build()
        except (ImportError, OSError, CannotBuildError) as error:
            built[name] = str(error)
    return built
