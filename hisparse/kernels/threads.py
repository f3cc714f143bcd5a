"""PyTorch's operators on the calling thread only."""

from typing import Any

import torch

from hisparse.kernels.build.cpu import cpu_library

__all__ = ["serial_operators"]


class serial_operators:
    """Run PyTorch's CPU operators that the calling thread starts on that thread only.

    The operators of a decode step are small. Joining an OpenMP team waits for each of its threads;
    on a core that another process keeps busy, that takes 10 to 40 ms where the operator takes 0.1.
    The kernels of this package keep their threads, and use one for a while after such a wait.
    Without the C++ kernels, or on another device, this changes nothing.

    Args:
        device: device of the operators.
    """

    __slots__ = ("_before", "_library")

    def __init__(self, device: torch.device) -> None:
        self._library: Any = cpu_library() if device.type == "cpu" else None
        #: Threads before each entry that has not ended.
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before.append(1 if self._library is None else self._library.hold_openmp())

    def __exit__(self, *error: object) -> None:
        before = self._before.pop()
        if before > 1:
            self._library.release_openmp(before)
