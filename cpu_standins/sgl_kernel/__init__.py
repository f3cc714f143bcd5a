"""Stand-in for sgl_kernel on a CPU-only machine: it is a CUDA library.

SGLang imports names from it at module level; calling one of them here is an error.
"""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise ImportError(f"sgl_kernel.{name} needs CUDA; sgl_kernel is a stand-in on this set-up")

    return missing
