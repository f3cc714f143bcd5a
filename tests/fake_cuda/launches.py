"""Counts what a step launches on a GPU, by name.

What counts as one launch:

- a call of a CUDA operation or of a Triton kernel (``rebalance`` launches three kernels);
- an operator of PyTorch that makes or changes a CUDA tensor with elements. The operator is the one
  that reaches the device: composed ones count as their parts. It counts once, even if PyTorch's
  implementation has several kernels (``sort``, ``topk``, ``cumsum``);
- a copy between host and device.

Views, allocations without values, and changes of metadata count nothing.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hisparse.cache.streams import Pending, SideStream
from hisparse.kernels.operation import OPERATIONS
from hisparse.testing.operations import tensors_in
from tests.kernels.gpu.on_gpu import IN_HOST_MEMORY

__all__ = ["Launch", "Launches", "WrongDevice"]

T = TypeVar("T")

#: Operators of PyTorch that launch nothing and are no views.
_NOTHING = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("detach", "lift", "lift_fresh", "alias", "_unsafe_view", "_reshape_alias", "set_", "resize_"),
}
_COPIES = {"_to_copy", "copy_"}
#: CUDA operations that launch another number of kernels than one.
_KERNELS = {
    "diff_tables_scratch_bytes": 0,
    "select_scratch_words": 0,
    "copy_pages": 1,
    "rebalance": 3,
}
#: What an operation gives back to the host.
_ANSWERS: dict[str, Any] = {
    "diff_tables_scratch_bytes": 16384,
    "select_scratch_words": 4096,
    "copy_pages": True,
}


class WrongDevice(AssertionError):
    """A launch got a tensor that lies where the kernel cannot read it."""


@dataclass(frozen=True)
class Launch:
    """One launch, or one operation that launches several kernels.

    Attributes:
        name: of the operation; "aten." before PyTorch's, "triton." before Triton's, and "aside."
            before all of them on a side stream.
        layer: the layer that it belongs to; None: outside of the layers.
        count: kernels.
        kernel: the Triton kernel; None for all others.
        arguments: the Triton kernel's arguments and options by name.
        grid: its programs.
    """

    name: str
    layer: int | None
    count: int = 1
    kernel: Any = field(default=None, compare=False)
    arguments: Mapping[str, Any] = field(default_factory=dict, compare=False)
    grid: tuple[int, ...] = field(default=(), compare=False)


class Launches(TorchDispatchMode):
    """Every launch within it, in order.

    Args:
        pinned: the tensors in page-locked memory.

    Attributes:
        all: the launches.
        library: takes the place of the library of CUDA kernels.
        aside: takes the place of the side stream.
        waits: copies between host and device that wait for the stream, with the line that copies.
    """

    def __init__(self, pinned: Any) -> None:
        super().__init__()
        self.pinned = pinned
        self.all: list[Launch] = []
        self.waits: list[str] = []
        self.library = _Library(self)
        self.aside = _Aside()
        self._layer: int | None = None
        self._forward, self._captured = "a forward", False

    @contextmanager
    def layer(self, number: int) -> Iterator[None]:
        """Count what is launched within it for a layer."""
        self._layer = number
        try:
            yield
        finally:
            self._layer = None

    @contextmanager
    def forward(self, name: str, *, captured: bool = False) -> Iterator[None]:
        """Count a forward anew; in a captured one, refuse copies from or to the host.

        A graph would repeat such a copy with the values of the capture. Copies from or to
        page-locked memory that do not wait are allowed.
        """
        self.all.clear()
        self._forward, self._captured = name, captured
        try:
            yield
        finally:
            self._captured = False

    def of_layer(self, number: int) -> Counter[str]:
        """Kernels by name that one layer launched."""
        found: Counter[str] = Counter()
        for launch in self.all:
            if launch.layer == number and launch.count:
                found[launch.name] += launch.count
        return found

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        name = func.overloadpacket.__name__
        given = tensors_in((args, options))
        pins = options.get("pin_memory")
        if name == "_pin_memory":
            # Fake tensors do not have this operator, which keeps strides.
            func, pins = torch.ops.aten.empty_strided.default, True
            args = (given[0].shape, given[0].stride())
            options = {"dtype": given[0].dtype}
        out = func(*args, **options)
        made = tensors_in(out)
        if pins:
            for tensor in made:
                self.pinned.add(tensor)
        if name in _COPIES:
            self._check_copy(name, args, options, made)
        else:
            self._check_places(name, given)
        on_device = any(x.is_cuda and x.numel() for x in made) or (
            func._schema.is_mutable and any(x.is_cuda and x.numel() for x in given[:1])
        )
        copied_out = name in _COPIES and any(x.is_cuda and x.numel() for x in given)
        if (on_device or copied_out) and name not in _NOTHING and not func.is_view:
            self.add(Launch(f"aten.{name}", self._layer))
        return out

    def _check_places(self, name: str, given: list[Tensor]) -> None:
        devices = {x.device.type for x in given if x.dim()}
        if len(devices) > 1:
            raise WrongDevice(f"aten.{name}: got tensors on {' and '.join(sorted(devices))}")

    def _check_copy(
        self, name: str, args: Sequence[Any], options: Mapping[str, Any], made: list[Tensor]
    ) -> None:
        source, target = (args[1], args[0]) if name == "copy_" else (args[0], made[0])
        if source.device.type == target.device.type or not source.numel():
            return
        waits = not (args[2] if len(args) > 2 else options.get("non_blocking", False))
        host = source if target.is_cuda else target
        # PyTorch brings others into order in pageable memory first.
        alike = source.dtype == target.dtype and source.is_contiguous() and target.is_contiguous()
        if not waits and alike and host in self.pinned:
            return
        if self._captured:
            raise WrongDevice(
                f"aten.{name}: got a copy from {source.device} to {target.device} in "
                f"{self._forward}, expected none: a CUDA graph would repeat the same values"
            )
        self.waits.append(f"{list(source.shape)} from {source.device} to {target.device} {_line()}")

    def add(self, launch: Launch) -> None:
        aside = "aside." if self.aside.running else ""
        self.all.append(replace(launch, name=aside + launch.name))

    def call_cuda(self, name: str, *arguments: Any) -> Any:
        """A call of the library of CUDA kernels."""
        operation = OPERATIONS.get("gather_pages" if name == "copy_pages" else name)
        declared = operation.arguments if operation else []
        may_be_on_host = IN_HOST_MEMORY.get(name, ())
        for at, tensor in enumerate(arguments):
            if not isinstance(tensor, Tensor) or tensor.is_cuda:
                continue
            argument = declared[at] if at < len(declared) else None
            on_host = argument is not None and argument.name in may_be_on_host
            on_host = on_host and tensor in self.pinned
            if name == "copy_pages":
                # The lists of the copy engine are in host memory.
                on_host = tensor in self.pinned or at in (2, 5)
            if not on_host:
                what = argument.name if argument else f"argument {at}"
                raise WrongDevice(
                    f"{name}: {what} {list(tensor.shape)} is on {tensor.device}, expected CUDA "
                    "memory"
                )
        self.add(Launch(name, self._layer, _KERNELS.get(name, 1)))
        return _ANSWERS.get(name)

    def run_triton(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """In place of ``triton.JITFunction.run``."""
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | options
        blocks = grid(arguments) if callable(grid) else grid
        assert max(blocks[1:], default=1) <= 65_535, f"{kernel.__name__}: got a grid of {blocks}"
        for name, value in arguments.items():
            for tensor in tensors_in(value):
                if not tensor.is_cuda and tensor not in self.pinned:
                    raise WrongDevice(
                        f"{kernel.__name__}: {name} {list(tensor.shape)} is on {tensor.device}, "
                        "expected CUDA memory or page-locked memory"
                    )
        family = kernel.__module__.split(".")[-2]
        name = f"triton.{family}.{kernel.__name__.strip('_')}"
        self.add(Launch(name, self._layer, kernel=kernel, arguments=arguments, grid=tuple(grid)))


def _line() -> str:
    """The innermost line of the package that runs."""
    lines = [x for x in traceback.extract_stack() if "/hisparse/" in x.filename]
    return f"at {lines[-1].filename}:{lines[-1].lineno}" if lines else "in a test"


class _Aside(SideStream):
    def __init__(self) -> None:
        self.running = False

    def start(self, work: Callable[[], T]) -> Pending[T]:
        self.running = True
        try:
            return Pending(work())
        finally:
            self.running = False


class _Library:
    def __init__(self, launches: Launches) -> None:
        self._launches = launches

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments: self._launches.call_cuda(name, *arguments)
