"""Records calls of CPU kernels while tests run."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from torch import Tensor

from hisparse.kernels.build import cpu as _build
from hisparse.kernels.build.compiler import SOURCES
from tests.kernels.isa.calls import Call, Captured, Result

__all__ = ["Recorded", "Recorder", "kernel_names"]

#: A test may call a kernel with more memory than this, but such a call is not recorded.
_MOST_BYTES = 8 << 20


def kernel_names() -> list[str]:
    """The functions that the sources export, and that write to the tensors they take."""
    names: set[str] = set()
    for file in (SOURCES / "cpu").glob("*.cpp"):
        text = file.read_text()
        exported = re.findall(r"HISPARSE_EXPORT_KERNEL\((\w+)\)", text)
        # One that returns something only keeps its tensors, for a call of paged_attention.
        names |= {name for name in exported if f"void {name}(Arguments& in)" in text}
    return sorted(names)


class Recorded(NamedTuple):
    """A call that ``test`` made, and its result on this processor."""

    test: str
    call: Call
    result: Result


class Recorder:
    """A plug-in of pytest; also works without pytest, in :meth:`recording`.

    A call is recorded unless the same test made one before with the same kernel, dtypes, shapes,
    strides, scalars and error.

    Attributes:
        recorded: the calls so far.
    """

    def __init__(self) -> None:
        self.recorded: list[Recorded] = []
        self._library = _build.cpu_library()
        self._names = kernel_names()
        self._seen: set[tuple[object, ...]] = set()
        self._test = ""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what :func:`hisparse.kernels.build.cpu.call_cpu` calls."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_build, "cpu_library", lambda: _Library(self.call))
            yield

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out tests of other implementations."""
        others = re.compile(r"\[.*(reference|cuda|triton)")
        items[:] = [item for item in items if not others.search(item.name)]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Remember which test runs."""
        self._test = item.nodeid.partition("[")[0]

    def call(self, name: str, *arguments: object) -> Any:
        """Call a function of the library, and record it if it is a kernel that gets tensors."""
        kernel = getattr(self._library, name)
        tensors = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
            for x in arguments
            if isinstance(x, Tensor)
        }
        if name not in self._names or not tensors or sum(tensors.values()) > _MOST_BYTES:
            return kernel(*arguments)
        captured, outcome = Captured(name, arguments), "ok"
        try:
            kernel(*arguments)
        except ValueError as error:
            outcome = f"ValueError: {error}"
            raise
        finally:
            key = (self._test, name, outcome, *map(_signature, arguments))
            if key not in self._seen:
                self._seen.add(key)
                result = captured.result(outcome)
                self.recorded.append(Recorded(self._test, captured.call, result))


class _Library:
    """Stands in for the library of CPU kernels."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self._call, name)


def _signature(argument: object) -> object:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.shape, argument.stride()
    return argument
