"""An operation: one declaration gives its check, the choice of who runs it, and the native call.

A folder of this package holds a family of operations. ``op.py`` declares them and has the public
functions. Implementations are functions of the operation's name in modules beside it:
``reference.py`` in plain PyTorch, which each operation has, or named after what runs them. Kernels
in C++ and CUDA C++ need no module: the declaration names the function that surrounds their call,
if there is any. An implementation takes the declared tensors in their order, groups of them as
named tuples, and then the numbers.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import threading
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
#: Whether Triton's kernels run on CPU tensors, in its interpreter.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

Implementation = Callable[..., Any]
#: Of the calling thread, the :class:`ResultMemory` that it has entered.
_ENTERED = threading.local()


class ResultMemory(dict[Hashable, list[tuple[Tensor, torch.UntypedStorage]]]):
    """Memory for results of C++ kernels that a thread calls while it has entered this object.

    The results of a call take the memory of those of the last call of this operation and sizes, if
    no tensor refers to that any more, views included. So layers of equal shapes allocate no
    results, and a result that somebody keeps does not change. An item is the results of the last
    call, and their storage.

    Args:
        keeps: whether to keep all items, for recorded calls that write to them again.

    Attributes:
        storages: addresses of the storages of what is kept.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        super().__init__()
        self._kept: list[list[tuple[Tensor, torch.UntypedStorage]]] | None = [] if keeps else None
        self.storages: set[int] = set()
        self._outer: ResultMemory | None = None
        #: Items of the last step that this one has not used.
        self._unused: dict[Hashable, list[tuple[Tensor, torch.UntypedStorage]]] = {}

    def begin_step(self) -> ResultMemory:
        """This object, without what the last step did not use: sizes grow with the contexts."""
        self._unused = dict(self)
        self.clear()
        return self

    def __enter__(self) -> None:
        self._outer = getattr(_ENTERED, "memory", None)
        _ENTERED.memory = self

    def __exit__(self, *error: object) -> None:
        _ENTERED.memory = self._outer

    def take(self, key: Hashable, allocate: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Results, uninitialised; for equal keys ``allocate`` makes tensors of equal shapes."""
        items = self.get(key) or self._unused.pop(key, None)
        # An item's tensor and storage are two users; a result is another one while it lives.
        if items is None or any(
            [torch._C._storage_Use_Count(storage._cdata) > 2 for _, storage in items]
        ):
            items = [(x, x.untyped_storage()) for x in allocate()]
            if self._kept is not None:
                self._kept.append(items)
                self.storages.update(storage.data_ptr() for _, storage in items)
        self[key] = items
        return [last.detach() for last, _ in items]


def new_results(key: Hashable, allocate: Callable[[], list[Tensor]], kind: str) -> list[Tensor]:
    """Uninitialised tensors for the results of a call.

    On a CPU they take the memory of an earlier call with the same key, if the calling thread has
    entered a :class:`ResultMemory`; otherwise, and on other devices, they are allocated.

    Args:
        key: names the operation and the sizes of its results.
        allocate: makes the tensors.
        kind: type of the device, such as "cpu".
    """
    memory: ResultMemory | None = getattr(_ENTERED, "memory", None)
    return allocate() if memory is None or kind != "cpu" else memory.take(key, allocate)


def new_tensors(
    name: str, shapes: Sequence[tuple[Sequence[int], torch.dtype]], device: torch.device
) -> list[Tensor]:
    """:func:`new_results` for what a Python function computes.

    Args:
        name: of the function; its tensors may not share memory with those of another name.
        shapes: shape and dtype of each tensor.
        device: where they lie.
    """
    return new_results(
        (name, *shapes),
        lambda: [torch.empty(x, dtype=dtype, device=device) for x, dtype in shapes],
        device.type,
    )


class Place(NamedTuple):
    """Where the tensors of a call lie."""

    devices: str  # such as "cpu" or "cpu, cuda:0", for messages
    kind: str  # "cpu"; "cuda", where some may be in host memory; or "other"

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
        cpu: the implementation by C++: takes :meth:`on_cpu` and then the arguments of an
            implementation. True if it only passes these on, none of which is a group.
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
        cpu: Implementation | bool = False,
        cuda: Implementation | bool = False,
        sizes: tuple[str, ...] = (),
        on: str | None = None,
        also: Callable[[Mapping[str, Any], Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.name = name
        self.arguments = arguments
        dense = [(i, x) for i, x in enumerate(self.arguments) if x.layout != "any"]
        #: Place and layout of each read tensor, which is copied if its layout differs.
        self._layouts = [(i, x.layout) for i, x in dense if not x.written]
        #: Places of written tensors, whose strides are checked.
        self._strided = [i for i, x in dense if x.written]
        self._results = [(x.dtype, Shape(x.shape).sizes) for x in results]
        self._sizes = _sizes_of(self._results, arguments, sizes)
        self._always_given = [x.optional for x in arguments].index(False)
        self._num_sizes = len(sizes)
        self._values = values
        self._adapters = {"cpu": cpu, "cuda": cuda}
        self._on = on or self.arguments[0].name
        self._also = also
        self._folder = declared_in.rpartition(".")[0]
        #: By implementation, those that were looked for; None: there is none.
        self.functions: dict[str, Implementation | None] = {}
        #: Where the tensors of checked calls lie, by what was checked.
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
            KernelError: a tensor does not fit its declaration, there is no such implementation, or
                it cannot run here.
        """
        key: tuple[Hashable, ...] = (
            values, *[None if x is None else (x.dtype, x.shape, x.device) for x in tensors]
        )  # fmt: skip
        if self._strided:
            written = [tensors[i] for i in self._strided]
            key += tuple([None if x is None else x.stride() for x in written])
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
            native = "cpu" if place.kind == "cpu" else "cuda"
            return self.function("reference" if _why_not(self, native, place) else native)
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
        found = None if impl == "triton" else self.lookup(impl)
        if found is None and impl in ("cuda", "triton") and why_no_triton() is None:
            found = self.lookup("triton")
        found = found or self.lookup("reference")
        assert found is not None, f"{self.name} has no reference"
        return found

    def lookup(self, impl: str) -> Implementation | None:
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
        tensors: list[Any] = self.native([*arguments[:count]])
        if not self._results:
            call(self.name, *tensors, *arguments[count:end])
            return ()
        sizes = {
            name: arguments[end + at] if place < 0 else tensors[place].shape[at]
            for name, (place, at) in self._sizes.items()
        }

        def allocate() -> list[Tensor]:
            given = tensors[self._always_given]
            return [
                given.new_empty([x.factor * sizes[x.name] + x.more for x in shape], dtype=dtype)
                for dtype, shape in self._results
            ]

        kind = "cpu" if call is call_cpu else "cuda"
        results = new_results((self.name, *sizes.values()), allocate, kind)
        call(self.name, *tensors, *results, *arguments[count:end])
        return results[0] if len(results) == 1 else tuple(results)

    def native(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """The same list, with tensors in the layout that a native kernel needs."""
        for index, layout in self._layouts:
            tensor = tensors[index]
            # Most are contiguous, and to ask for that is the cheapest.
            if tensor is None or tensor.is_contiguous():
                continue
            if layout == "all" or tensor.stride(-1) != 1:
                tensors[index] = tensor.contiguous()
        return tensors


def _sizes_of(
    results: Sequence[tuple[torch.dtype, list[Size]]],
    arguments: Sequence[Arg],
    sizes: Sequence[str],
) -> dict[str, tuple[int, int]]:
    """Where the sizes of results are: place of a tensor and dimension, or -1 and index in sizes."""
    found = {name: (-1, index) for index, name in enumerate(sizes)}
    for place, argument in enumerate(arguments):
        for index, size in enumerate(reversed(argument.shape.sizes), start=1):
            if (size.factor, size.more) == (1, 0) and not argument.optional:
                found.setdefault(size.name, (place, -index))
    return {size.name: found[size.name] for _, shape in results for size in shape}


@functools.cache
def why_no_triton() -> str | None:
    """One line, which is also logged, if Triton cannot be imported: the reference takes over."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        logger.warning("Triton kernels are off, PyTorch's operators do their work: %s", error)
        return str(error)
    return None


def _why_not(operation: Operation, impl: str, place: Place) -> str | None:
    """One line that says why an implementation cannot run on tensors at a place; None: it can."""
    if impl == "reference":
        return None
    if impl == "triton" and (place.kind == "cuda" or _INTERPRETED):
        return why_no_triton() or (None if operation.lookup(impl) else f"{operation.name} has none")
    if place.kind != impl:
        return f"tensors are on {place.devices}"
    library = cpu_library() if impl == "cpu" else build_cuda.cuda_library()
    return "the library cannot be built" if library is None else None


def _function(impl: str, operation: Operation, place: Place) -> Implementation:
    reason = _why_not(operation, impl, place)
    if reason is not None:
        names = (x for x in IMPLEMENTATIONS if _why_not(operation, x, place) is None)
        choices = ", ".join(["auto", *names])
        raise KernelError(f"implementation {impl!r}: {reason} (choices: {choices})")
    return operation.function(impl)


#: By name: finds an operation's function for tensors at a place, or raises ``KernelError``.
IMPLEMENTATIONS: dict[str, Callable[[Operation, Place], Implementation]] = {
    impl: functools.partial(_function, impl) for impl in ("reference", "cpu", "cuda", "triton")
}
#: All operations by name, as their modules are imported.
OPERATIONS: dict[str, Operation] = {}
