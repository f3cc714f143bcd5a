"""Stand-in for torchvision on a CPU-only machine: names that SGLang imports, nothing behind them.

torchvision has no CPU build in the package index that PyTorch's CPU wheel comes from, and the one
that pip finds brings CUDA. Text models never call what is missing here.
"""

from typing import NoReturn

__version__ = "0.0.0+hisparse.standin"


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"torchvision.{name}: torchvision is a stand-in on this CPU-only set-up, with the names "
        "that text models need; install the real one for others"
    )
