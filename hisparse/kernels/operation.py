"""An operation: one declaration gives its check, the choice of who runs it, and the native call.

A folder of this package holds a family of operations. ``op.py`` declares them and has the public
functions; the implementations lie beside it, each a function of the operation's name:
``reference.py`` in plain PyTorch, ``cpu.py`` by C++, ``cuda.py`` by CUDA C++ and ``triton.py``.
Only the reference has to be there. An implementation takes the declared tensors in their order
(groups of them as named tuples), and then the numbers. Where a native kernel takes the same, the
declaration says so, and no function is written for it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hisparse.errors import KernelError, unknown_name
from hisparse.kernels.arguments import Arg, Result, Shape, Size, Sizes, check_all
from hisparse.kernels.build import cuda as build_cuda
from hisparse.kernels.build.cpu import call_cpu, cpu_library
from hisparse.kernels.build.cuda import call_cuda

logger = logging.getLogger(__name__)

_MAX_PASSED = 4096

Implementation = Callable[..., Any]
#: Takes the call of a native kernel, and the arguments of an implementation; returns the results.
_Adapter = Callable[..., Any]
_SizeOf = Callable[[Sequence[Any], Sequence[int]], int]
_Maker = Callable[[Sequence[Any], Sequence[int]], Tensor]


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
        arguments: the tensors that it takes.
        results: the tensors that a native kernel returns.
        values: names of what the check gets in addition to tensors.
        cpu: stands in for a function in ``cpu.py``: takes :meth:`on_cpu` and the arguments of an
            implementation, and calls the one with the others. True if they are the same.
        cuda: the same for CUDA C++.
        sizes: names of sizes of results that no tensor has.
        on: the tensor on whose device the others are; the first one if None.
        also: a further check, of the tensors by name and of the sizes and values by name. It may
            look at nothing of a tensor but dtype, shape and device.
    """

    def __init__(
        self,
        declared_in: str,
        name: str,
        *arguments: Arg,
        results: tuple[Result, ...] = (),
        values: tuple[str, ...] = (),
        cpu: _Adapter | bool = False,
        cuda: _Adapter | bool = False,
        sizes: tuple[str, ...] = (),
        on: str | None = None,
        also: Callable[[Mapping[str, Any], Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.name = name
        self.arguments = arguments
        layouts = ((i, x.layout) for i, x in enumerate(self.arguments))
        self._layouts = [(i, layout) for i, layout in layouts if layout != "any"]
        self._make_results = _makers(arguments, results, sizes)
        self._num_sizes = len(sizes)
        self._values = values
        self._adapters = {"cpu": cpu, "cuda": cuda}
        self._on = on or self.arguments[0].name
        self._also = also
        self._folder = declared_in.rpartition(".")[0]
        #: By implementation, those that were looked for; None: there is none.
        self.functions: dict[str, Implementation | None] = {}
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
            function = self.functions.get("reference" if cpu_library() is None else "cpu")
            if function is not None:
                return function
        return self.implementation(impl, place)

    def implementation(self, impl: str, place: Place) -> Implementation:
        """The function that runs on tensors at ``place``; see :meth:`__call__`."""
        if impl == "auto":
            if place.kind == "cpu":
                return self.function("reference" if cpu_library() is None else "cpu")
            reason = _why_not(place, "cuda", build_cuda.cuda_library)
            return self.function("reference" if reason else "cuda")
        if impl not in IMPLEMENTATIONS:
            raise KernelError(unknown_name("implementation", impl, ("auto", *IMPLEMENTATIONS)))
        return IMPLEMENTATIONS[impl](self, place)

    def _check(self, tensors: Sequence[Tensor | None], values: Sequence[Any]) -> None:
        sizes: Sizes = dict(zip(self._values, values, strict=True))
        known = check_all(self.arguments, tensors, sizes, self._on)
        if self._also is not None:
            self._also(known, sizes)

    def function(self, impl: str) -> Implementation:
        """The function that runs as ``impl``: its own, or else that of the next in line.

        "cuda" is followed by Triton, everything by the reference.
        """
        found = None if impl == "triton" else self.own(impl)
        if found is None and impl in ("cuda", "triton") and why_no_triton() is None:
            found = self.own("triton")
        found = found or self.own("reference")
        assert found is not None, f"{self.name} has no reference"
        return found

    def own(self, impl: str) -> Implementation | None:
        """The function of the operation as ``impl``; None: there is none."""
        if impl not in self.functions:
            name = f"{self._folder}.{impl}"
            module = importlib.import_module(name) if importlib.util.find_spec(name) else None
            found = getattr(module, self.name, None)
            self.functions[impl] = found or self._declared(impl)
        return self.functions[impl]

    def _declared(self, impl: str) -> Implementation | None:
        """The call of a native kernel that the declaration describes."""
        adapt = self._adapters.get(impl, False)
        call = self.on_cpu if impl == "cpu" else self.on_cuda
        if adapt is True:
            return call
        return functools.partial(adapt, call) if adapt else None

    def on_cpu(self, *arguments: Any) -> Any:
        """Call the C++ kernel of this name, with new results after the tensors.

        Args:
            arguments: the tensors as declared, the kernel's numbers, and the ``sizes``.

        Returns:
            the result; several, or none, as a tuple.

        Raises:
            KernelError: the kernel refuses a tensor; one line that names it.
        """
        return self._run(call_cpu, arguments)

    def on_cuda(self, *arguments: Any) -> Any:
        """The same for the CUDA kernel of this name, on the current stream."""
        return self._run(call_cuda, arguments)

    def _run(self, call: Callable[..., object], arguments: Sequence[Any]) -> Any:
        count, end = len(self.arguments), len(arguments) - self._num_sizes
        tensors: list[Any] = self.native(arguments[:count])
        for make in self._make_results:
            tensors.append(make(tensors, arguments[end:]))
        call(self.name, *tensors, *arguments[count:end])
        return tensors[count] if len(self._make_results) == 1 else tuple(tensors[count:])

    def native(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The tensors with the layout that a native kernel needs."""
        given = list(tensors)
        for index, layout in self._layouts:
            tensor = given[index]
            # Most are contiguous, and to ask for that is the cheapest.
            if tensor is None or tensor.is_contiguous():
                continue
            if layout == "all" or tensor.stride(-1) != 1:
                given[index] = tensor.contiguous()
        return given


def _makers(
    arguments: Sequence[Arg], results: Sequence[Result], sizes: Sequence[str]
) -> list[_Maker]:
    """For each result a function that allocates it from the tensors before it, and the sizes.

    PyTorch allocates fastest with ``empty_like``, next with ``new_empty``, and slowest where a
    dtype has to be given. Which of them makes a result is decided here, once.
    """
    # Tensors that are there when a result is made, by their place among arguments and results.
    known = {i: (x.dtypes, x.shape) for i, x in enumerate(arguments) if not x.optional}
    makers = []
    for place, result in enumerate(results, start=len(arguments)):
        shape = Shape(result.shape)
        dtype = result.dtype if isinstance(result.dtype, str) else (result.dtype,)
        same = [i for i, (dtypes, _) in known.items() if dtypes == dtype]
        same += [i for i, x in enumerate(arguments) if x.name == dtype]
        alike = [i for i in same if known[i][1].sizes == shape.sizes]
        if alike:
            makers.append(_make_like(alike[0]))
        else:
            source = same[0] if same else next(iter(known))
            given = None if same or isinstance(result.dtype, str) else result.dtype
            lengths = [_size_in(known, size, sizes) for size in shape.sizes]
            makers.append(_make_new(source, lengths, given))
        known[place] = (dtype, shape)
    return makers


def _make_like(source: int) -> _Maker:
    """Makes a result of the shape and dtype of the tensor at ``source``."""
    return lambda tensors, sizes: torch.empty_like(tensors[source])


def _make_new(source: int, shape: Sequence[_SizeOf], dtype: torch.dtype | None) -> _Maker:
    """Makes a result on the device of the tensor at ``source``, in its dtype if none is given."""
    options = {} if dtype is None else {"dtype": dtype}

    def make(tensors: Sequence[Any], sizes: Sequence[int]) -> Tensor:
        new: Tensor = tensors[source].new_empty([x(tensors, sizes) for x in shape], **options)
        return new

    return make


def _size_in(known: Mapping[int, tuple[Any, Shape]], size: Size, sizes: Sequence[str]) -> _SizeOf:
    """A function that finds a size in a tensor that has it, or in the sizes that a call gives."""
    name, factor, more = size
    for place, (_, shape) in known.items():
        for dim, other in enumerate(shape.sizes):
            if other == (name, 1, 0):
                last = dim - len(shape.sizes)
                if (factor, more) == (1, 0):
                    return lambda tensors, sizes: tensors[place].shape[last]
                return lambda tensors, sizes: factor * int(tensors[place].shape[last]) + more
    if not name:
        return lambda tensors, sizes: more
    at = sizes.index(name)
    return lambda tensors, sizes: factor * sizes[at] + more


@functools.cache
def why_no_triton() -> str | None:
    """One line, which is also logged, if Triton cannot be imported: the reference takes over."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        logger.warning("Triton kernels are off, PyTorch's operators do their work: %s", error)
        return str(error)
    return None


def _why_not(place: Place, kind: str, library: Callable[[], Any]) -> str | None:
    """One line that says why native kernels cannot run on tensors at a place; None: they can."""
    if place.kind != kind:
        return f"tensors are on {place.devices}"
    return "the library cannot be built" if library() is None else None


def _why_not_triton(operation: Operation) -> str | None:
    reason = why_no_triton()
    if reason is None and operation.own("triton") is None:
        reason = f"{operation.name} has none"
    return reason


def _unless(reason: str | None, operation: Operation, impl: str) -> Implementation:
    if reason is not None:
        raise KernelError(f"implementation {impl!r}: {reason} (choices: auto, reference)")
    return operation.function(impl)


#: By name: finds an operation's function for tensors at a place, or raises ``KernelError``.
IMPLEMENTATIONS: dict[str, Callable[[Operation, Place], Implementation]] = {
    "reference": lambda operation, place: operation.function("reference"),
    "cpu": lambda operation, place: _unless(_why_not(place, "cpu", cpu_library), operation, "cpu"),
    "cuda": lambda operation, place: _unless(
        _why_not(place, "cuda", build_cuda.cuda_library), operation, "cuda"
    ),
    "triton": lambda operation, place: _unless(_why_not_triton(operation), operation, "triton"),
}
#: All operations by name, as their modules are imported.
OPERATIONS: dict[str, Operation] = {}
