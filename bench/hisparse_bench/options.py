"""Options that the kernel benchmarks share: device, number of steps, dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hisparse.errors import ConfigError, unknown_name

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a kernel benchmark.

    Attributes:
        device: device of the kernels.
        num_steps: timed steps of each implementation.
        seed: seed of the inputs.
    """

    device: torch.device
    num_steps: int
    seed: int = 0


def device_of(name: str) -> torch.device:
    """The device of a name.

    Raises:
        ConfigError: the name is unknown, or this machine has no such device.
    """
    if name not in ("cpu", "cuda"):
        raise ConfigError(unknown_name("--device", name, ("cpu", "cuda")))
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: got cuda, PyTorch finds no CUDA GPU here (choices: cpu)")
    return torch.device(name)


def dtype_of(name: str, choices: Sequence[str] = tuple(DTYPES)) -> torch.dtype:
    """The dtype of a name.

    Raises:
        ConfigError: the name is not among the choices.
    """
    if name not in choices:
        raise ConfigError(unknown_name("--dtype", name, tuple(choices)))
    return DTYPES[name]
