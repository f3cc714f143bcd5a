"""The CUDA operations on a real GPU, for the suite whose tensors lie on the CPU.

Every call moves its tensors over (the host side of a transfer to pinned memory instead), runs, and
writes back what the operation wrote. What a tensor held in between is that of the suite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hisparse.kernels import SelectRule, cuda
from hisparse.kernels.cuda import IN_TRITON

ON_GPU = "cuda-on-gpu"
#: Where copies are made; a test without a GPU changes both.
DEVICE_MEMORY: dict[str, Any] = {"device": "cuda"}
PINNED_MEMORY: dict[str, Any] = {"pin_memory": True}
#: Position of the argument whose tensors stay in (pinned) host memory.
_HOST_SIDE = {"append_tokens": 1, "gather_pages": 0, "scatter_tokens": 1, "gather_tokens": 0}


class _Copies:
    """Copies of an operation's tensors."""

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, Tensor]] = []

    def of(self, value: Any, *, pinned: bool) -> Any:
        if isinstance(value, Tensor):
            return self._copy(value, pinned=pinned)
        if isinstance(value, tuple):
            parts = [self.of(x, pinned=pinned) for x in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, SelectRule):
            return replace(value, invalid_scores=self.of(value.invalid_scores, pinned=pinned))
        return value

    def _copy(self, tensor: Tensor, *, pinned: bool) -> Tensor:
        for held, copy in self._made:
            # MLA's values are the first columns of its keys: they have to stay that.
            if _is_view(tensor, held):
                return copy[..., : tensor.shape[-1]]
        shape, strides = tensor.shape, tensor.stride()
        where = PINNED_MEMORY if pinned else DEVICE_MEMORY
        copy = torch.empty_strided(shape, strides, dtype=tensor.dtype, **where)
        copy.copy_(tensor)
        self._made.append((tensor, copy))
        return copy

    def write_back(self) -> None:
        torch.cuda.synchronize()
        for tensor, copy in self._made:
            now = copy.cpu()
            if not torch.equal(_bits(now), _bits(tensor)):
                tensor.copy_(now)


def _is_view(tensor: Tensor, of: Tensor) -> bool:
    """Whether ``tensor`` is the first columns of ``of``."""
    same = tensor.data_ptr() == of.data_ptr() and tensor.stride() == of.stride()
    return same and tensor.shape[:-1] == of.shape[:-1] and tensor.shape[-1] < of.shape[-1]


def _bits(tensor: Tensor) -> Tensor:
    # Cloned: a tensor of one element counts as contiguous whatever its strides, and a view as bytes
    # is refused then.
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _back(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.cpu()
    if isinstance(result, tuple):
        parts = [_back(x) for x in result]
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
    return result


OPERATIONS = (*cuda.__all__, *IN_TRITON)


def _wrap(name: str) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        copies = _Copies()
        host_side = _HOST_SIDE.get(name)
        moved = [copies.of(arg, pinned=at == host_side) for at, arg in enumerate(args)]
        result = getattr(cuda, name)(*moved)
        copies.write_back()
        # Results that were given to be written to are the caller's own.
        given = args[6] if name == "lru_diff" and len(args) > 6 else None
        return _back(result) if given is None else given

    return run


def __getattr__(name: str) -> Any:
    if name in OPERATIONS:
        return _wrap(name)
    raise AttributeError(name)
