"""The CUDA operations on a real GPU, for the suite whose tensors lie on the CPU.

Every call moves its tensors over (the host side of a transfer to pinned memory instead), runs, and
writes back what the operation wrote. What a tensor held in between is that of the suite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from hisparse.kernels.operation import Operation

ON_GPU = "cuda-on-gpu"
#: Where copies are made; a test without a GPU changes both.
DEVICE_MEMORY: dict[str, Any] = {"device": "cuda"}
PINNED_MEMORY: dict[str, Any] = {"pin_memory": True}
#: Tensors that may lie in pinned host memory while the others of an operation are on a GPU.
IN_HOST_MEMORY = {
    "gather_pages": ("src.k", "src.v"),
    "gather_tokens": ("src.k", "src.v"),
    "scatter_tokens": ("dst.k", "dst.v"),
    "append_tokens": ("host.k", "host.v"),
    "sketch_score": ("tail.new.host.k", "tail.new.host.v"),
}


class _Copies:
    """Copies of an operation's tensors."""

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, Tensor]] = []

    def of(self, value: Any, *, pinned: bool) -> Any:
        """A tensor's copy; anything else as it is."""
        return self._copy(value, pinned=pinned) if isinstance(value, Tensor) else value

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


def on_gpu(operation: Operation) -> Callable[..., Any]:
    """An operation's CUDA function, through copies on the GPU."""
    return _through_copies(operation.function("cuda"), operation)


def _through_copies(function: Callable[..., Any], operation: Operation) -> Callable[..., Any]:
    on_host = IN_HOST_MEMORY.get(operation.name, ())

    def run(*args: Any) -> Any:
        copies = _Copies()
        leaves, structure = tree_flatten(args)
        host = [x.name in on_host for x in operation.arguments] + [False] * len(leaves)
        moved = [copies.of(x, pinned=pinned) for x, pinned in zip(leaves, host, strict=False)]
        result = function(*tree_unflatten(moved, structure))
        copies.write_back()
        return tree_map_only(Tensor, Tensor.cpu, result)

    return run
