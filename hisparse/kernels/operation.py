"""An operation: one declaration gives its check, the choice of who runs it, and the native call.

A folder of this package holds a family of operations. ``op.py`` declares them and has the public
functions; the implementations lie beside it, each a function of the operation's name:
``reference.py`` in plain PyTorch, ``cpu.py`` by C++, ``cuda.py`` by CUDA C++ and ``triton.py``.
Only the reference has to be there. An implementation takes the declared tensors in their order
(groups of them as named tuples), and then the numbers.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hisparse.errors import KernelError, unknown_name
from hisparse.kernels.arguments import Arg, Result, Shape, Sizes, check_all
from hisparse.kernels.build import cuda as build_cuda
from hisparse.kernels.build.cpu import call_cpu, cpu_library
from hisparse.kernels.build.cuda import call_cuda

__all__ = ["IMPLEMENTATIONS", "OPERATIONS", "Operation", "Place", "why_no_triton"]

logger = logging.getLogger(__name__)

_MAX_PASSED = 4096

Implementation = Callable[..., Any]
_Allocator = Callable[[Sequence[Tensor | None], Mapping[str, int]], "tuple[Tensor, ...]"]


class Place(NamedTuple):
    """Where the tensors of a call lie.

    Attributes:
        devices: such as "cpu" or "cpu, cuda:0", for messages.
        kind: "cpu"; "cuda", where some may be in host memory; or "other".
    """

    devices: str
    kind: str

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None]) -> Place:
        """The devices of all tensors that are there."""
        devices = {x.device for x in tensors if x is not None}
        kinds = {device.type for device in devices}
        kind = "cpu" if kinds == {"cpu"} else "other"
        if "cuda" in kinds and kinds <= {"cuda", "cpu"}:
            kind = "cuda"
        return cls(", ".join(sorted(map(str, devices))), kind)


class Operation:
    """An operation on tensors.

    Args:
        declared_in: name of the module that declares it; the implementations lie beside that.
        name: of its functions, and of its native kernels.
        arguments: the tensors that it takes, then those that a native kernel returns.
        values: names of what the check gets in addition to tensors.
        on: the tensor on whose device the others are; the first one if None.
        also: a further check, of the tensors by name and of the sizes and values by name. It may
            look at nothing of a tensor but dtype, shape and device.
    """

    def __init__(
        self,
        declared_in: str,
        name: str,
        *arguments: Arg | Result,
        values: tuple[str, ...] = (),
        on: str | None = None,
        also: Callable[[Mapping[str, Any], Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.name = name
        self.arguments = [x for x in arguments if isinstance(x, Arg)]
        layouts = ((i, x.layout) for i, x in enumerate(self.arguments))
        self._layouts = [(i, layout) for i, layout in layouts if layout != "any"]
        results = [x for x in arguments if isinstance(x, Result)]
        self._new_results = _allocator(self.arguments, results)
        self._values = values
        self._on = on or self.arguments[0].name
        self._also = also
        self._folder = declared_in.rpartition(".")[0]
        self._modules: dict[str, ModuleType | None] = {}
        #: Calls that passed the check, by what it looked at.
        self._passed: dict[Hashable, Place] = {}
        OPERATIONS[name] = self

    def __call__(
        self, impl: str, *tensors: Tensor | None, values: tuple[Hashable, ...] = ()
    ) -> Implementation:
        """Check tensors, unless such tensors passed before; returns the function to run on them.

        A step calls an operation in every layer, with tensors of the same dtypes, shapes and
        devices.

        Args:
            impl: one of ``IMPLEMENTATIONS``, or "auto" for the fastest that can run.
            tensors: as declared.
            values: as declared.

        Raises:
            KernelError: a tensor has another dtype, shape or device, there is no such
                implementation, or it cannot run here.
        """
        key = (values, *[None if x is None else (x.dtype, x.shape, x.device) for x in tensors])
        place = self._passed.get(key)
        if place is None:
            self._check(tensors, values)
            if len(self._passed) >= _MAX_PASSED:
                self._passed.clear()
            place = self._passed[key] = Place.of(tensors)
        if impl == "auto" and place.kind == "cpu":
            # Every operation of a step on a CPU comes here.
            module = self._modules.get("reference" if cpu_library() is None else "cpu")
            if module is not None:
                function: Implementation = getattr(module, self.name)
                return function
        return self.implementation(impl, place)

    def implementation(self, impl: str, place: Place) -> Implementation:
        """The function that runs on tensors at ``place``; see :meth:`__call__`."""
        if impl == "auto":
            if place.kind == "cpu":
                return self.function("reference" if cpu_library() is None else "cpu")
            found = _cuda(self, place)
            return self.function("reference") if isinstance(found, str) else found
        if impl not in IMPLEMENTATIONS:
            raise KernelError(unknown_name("implementation", impl, ("auto", *IMPLEMENTATIONS)))
        found = IMPLEMENTATIONS[impl](self, place)
        if isinstance(found, str):
            raise KernelError(f"implementation {impl!r}: {found} (choices: auto, reference)")
        return found

    def _check(self, tensors: Sequence[Tensor | None], values: Sequence[Any]) -> None:
        sizes: Sizes = dict(zip(self._values, values, strict=True))
        known = check_all(self.arguments, tensors, sizes, self._on)
        if self._also is not None:
            self._also(known, sizes)

    def function(self, impl: str) -> Implementation:
        """The function that runs as ``impl``: its own, or else that of the next in line.

        "cuda" is followed by Triton, everything by the reference.
        """
        function: Implementation = getattr(self.module(impl), self.name)
        return function

    def module(self, impl: str) -> ModuleType:
        """The module of :meth:`function`."""
        found = None if impl == "triton" else self.own_module(impl)
        if found is None and impl in ("cuda", "triton") and why_no_triton() is None:
            found = self.own_module("triton")
        found = found or self.own_module("reference")
        assert found is not None, f"{self.name} has no reference"
        return found

    def own_module(self, impl: str) -> ModuleType | None:
        """The module with a function of the operation as ``impl``; None: there is none."""
        if impl not in self._modules:
            name = f"{self._folder}.{impl}"
            module = importlib.import_module(name) if importlib.util.find_spec(name) else None
            self._modules[impl] = module if hasattr(module, self.name) else None
        return self._modules[impl]

    def on_cpu(
        self, *tensors: Tensor | None, more: Sequence[object] = (), **sizes: int
    ) -> tuple[Tensor, ...]:
        """Call the C++ kernel of this name: with the tensors, new results, then ``more``.

        Args:
            tensors: as declared; the last ones may be left out.
            more: what else the kernel takes, such as numbers.
            sizes: those of the results that no tensor has.

        Returns:
            the results.

        Raises:
            KernelError: the kernel refuses a tensor; one line that names it.
        """
        given = self.native(tensors)
        results = self._new_results(given, sizes)
        call_cpu(self.name, *given, *results, *more)
        return results

    def on_cuda(
        self, *tensors: Tensor | None, more: Sequence[object] = (), **sizes: int
    ) -> tuple[Tensor, ...]:
        """The same for the CUDA kernel of this name, on the current stream."""
        given = self.native(tensors)
        results = self._new_results(given, sizes)
        call_cuda(self.name, *given, *results, *more)
        return results

    def native(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The tensors with the layout that a native kernel needs."""
        given = list(tensors)
        for index, layout in self._layouts:
            tensor = given[index] if index < len(given) else None
            # Most are contiguous, and to ask for that is the cheapest.
            if tensor is None or tensor.is_contiguous():
                continue
            if layout == "all" or tensor.stride(-1) != 1:
                given[index] = tensor.contiguous()
        return given


def _allocator(arguments: Sequence[Arg], results: Sequence[Result]) -> _Allocator:
    """Compile a function that returns uninitialised results.

    The function is made from Python text, because a loop over declarations would take longer than
    PyTorch's allocations. An allocation is fastest with ``empty_like``, next with ``new_empty``,
    and slowest where a dtype has to be given.

    Args:
        arguments: the tensors that an operation takes.
        results: the tensors that it returns.

    Returns:
        a function of a call's tensors, of which the last ones may be left out, and of the sizes
        that no tensor has.
    """
    known: dict[str, tuple[Any, Shape]] = {
        f"given[{i}]": (x.dtypes, x.shape) for i, x in enumerate(arguments) if not x.optional
    }
    made = []
    for number, result in enumerate(results):
        shape = Shape(result.shape)
        dtype = result.dtype if isinstance(result.dtype, str) else (result.dtype,)
        same = [text for text, (dtypes, _) in known.items() if dtypes == dtype]
        if isinstance(dtype, str):
            named = [i for i, x in enumerate(arguments) if x.name == dtype]
            same = [*same, *(f"given[{i}]" for i in named)]
        alike = [name for name in same if known[name][1].sizes == shape.sizes]
        sizes = ", ".join(_size(known, *size) for size in shape.sizes)
        if alike:
            text = f"torch.empty_like({alike[0]})"
        elif same:
            text = f"{same[0]}.new_empty({sizes})"
        else:
            where = next(iter(known))
            text = f"torch.empty(({sizes},), dtype={result.dtype}, device={where}.device)"
        made.append(f"(r{number} := {text})")
        known[f"r{number}"] = (dtype, shape)
    text = f"lambda given, sizes: ({''.join(f'{x}, ' for x in made)})"
    compiled: _Allocator = eval(text, {"torch": torch})
    return compiled


def _size(known: Mapping[str, tuple[Any, Shape]], name: str, factor: int, more: int) -> str:
    """The text of a size."""
    text = f"sizes[{name!r}]"
    for tensor, (_, shape) in known.items():
        for dim, size in enumerate(shape.sizes):
            if size == (name, 1, 0):
                text = f"{tensor}.shape[{dim - len(shape.sizes)}]"
    return f"{factor} * {text} + {more}" if (factor, more) != (1, 0) else text


@functools.cache
def why_no_triton() -> str | None:
    """One line, which is also logged, if Triton cannot be imported: the reference takes over."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        logger.warning("Triton kernels are off, PyTorch's operators do their work: %s", error)
        return str(error)
    return None


def _cpu(operation: Operation, place: Place) -> Implementation | str:
    if place.kind != "cpu":
        return f"tensors are on {place.devices}"
    if cpu_library() is None:
        return "the library cannot be built"
    return operation.function("cpu")


def _cuda(operation: Operation, place: Place) -> Implementation | str:
    if place.kind != "cuda":
        return f"tensors are on {place.devices}"
    if build_cuda.cuda_library() is None:
        return "the library cannot be built"
    return operation.function("cuda")


def _triton(operation: Operation, place: Place) -> Implementation | str:
    reason = why_no_triton()
    if reason is None and operation.own_module("triton") is None:
        reason = f"{operation.name} has none"
    return reason or operation.function("triton")


#: By name: a function that returns an operation's function, or one line that says why it cannot
#: run on tensors at a place.
IMPLEMENTATIONS: dict[str, Callable[[Operation, Place], Implementation | str]] = {
    "reference": lambda operation, place: operation.function("reference"),
    "cpu": _cpu,
    "cuda": _cuda,
    "triton": _triton,
}
#: All operations by name, as their modules are imported.
OPERATIONS: dict[str, Operation] = {}
