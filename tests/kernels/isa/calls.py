"""Calls of CPU kernels as files: what ``rerun.cpp`` reads, and what it writes.

A call is a few lines. The bytes of a buffer follow its line; numbers of a line are separated by
spaces:

=================================================== ==============================================
``call NAME``                                       the kernel
``buffer BYTES``                                    memory of one or more tensors before the call
``tensor BUFFER OFFSET CODE BITS NDIM SHAPE STRIDES`` an argument; CODE and BITS are DLPack's
``int VALUE``, ``float VALUE``, ``bool VALUE``      an argument
``none``                                            an argument: a tensor that is absent
``end``
=================================================== ==============================================

The results have one line for each call, "ok" or the kernel's error, and behind it the bytes of all
of the call's buffers after it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Call", "Captured", "Result", "View", "read_results", "write_calls"]

#: DLPack's code and bits.
_DTYPES = {
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
    torch.bool: (6, 8),
    torch.int8: (0, 8),
    torch.float8_e4m3fn: (10, 8),
}


class Span(NamedTuple):
    """Memory from an address on."""

    address: int
    num_bytes: int

    def read(self) -> bytes:
        """Its bytes."""
        return ctypes.string_at(self.address, self.num_bytes) if self.num_bytes else b""


@dataclass(frozen=True)
class View:
    """A tensor: ``offset`` bytes into a buffer; strides in elements."""

    buffer: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, buffers: Sequence[bytearray]) -> Tensor:
        """The tensor in other buffers, which it shares."""
        memory = buffers[self.buffer]
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(memory, dtype=self.dtype, offset=self.offset)
        return flat.as_strided(self.shape, self.strides)


class Result(NamedTuple):
    """What a call left behind.

    Attributes:
        outcome: "ok", or the kernel's error, its class first.
        buffers: the call's buffers after it.
    """

    outcome: str
    buffers: list[bytearray]


@dataclass(frozen=True)
class Call:
    """A kernel, its arguments, and the memory that they view before the call."""

    name: str
    arguments: tuple[View | int | float | bool | None, ...]
    before: tuple[bytes, ...]

    @property
    def views(self) -> list[View]:
        """The arguments that are tensors."""
        return [x for x in self.arguments if isinstance(x, View)]

    def lines(self) -> Iterator[bytes]:
        """The call in a file."""
        yield f"call {self.name}\n".encode()
        for memory in self.before:
            yield f"buffer {len(memory)}\n".encode()
            yield memory
            yield b"\n"
        for argument in self.arguments:
            yield f"{_line(argument)}\n".encode()
        yield b"end\n"


def _line(argument: View | int | float | bool | None) -> str:
    if argument is None:
        return "none"
    if isinstance(argument, View):
        numbers = (argument.buffer, argument.offset, *_DTYPES[argument.dtype], len(argument.shape))
        return "tensor " + " ".join(map(str, (*numbers, *argument.shape, *argument.strides)))
    if isinstance(argument, bool):
        return f"bool {int(argument)}"
    return f"{type(argument).__name__} {argument!r}"


class Captured:
    """Copies what a call is about to get, and after the call what it left behind."""

    def __init__(self, name: str, arguments: Sequence[object]) -> None:
        self._spans = _spans(arguments)
        views = {i: self._view(x) for i, x in enumerate(arguments) if isinstance(x, Tensor)}
        values = tuple(views.get(i, x) for i, x in enumerate(arguments))
        self.call = Call(name, values, tuple(map(bytes, self._read())))

    def result(self, outcome: str) -> Result:
        """What the call left behind, once it has returned."""
        return Result(outcome, self._read())

    def _read(self) -> list[bytearray]:
        return [bytearray(span.read()) for span in self._spans.values()]

    def _view(self, tensor: Tensor) -> View:
        key = _storage(tensor)
        span = self._spans[key]
        offset = tensor.data_ptr() - span.address if tensor.numel() else 0
        buffer = list(self._spans).index(key)
        return View(buffer, offset, tensor.dtype, tuple(tensor.shape), tensor.stride())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _spans(arguments: Iterable[object]) -> dict[int, Span]:
    """By storage, the memory that tensors view in it."""
    spans: dict[int, Span] = {}
    for tensor in (x for x in arguments if isinstance(x, Tensor)):
        first = last = tensor.data_ptr()
        if tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            last += (1 + sum((n - 1) * step for n, step in steps)) * tensor.element_size()
        other = spans.get(_storage(tensor), Span(first, 0))
        if tensor.numel() and other.num_bytes:
            first, last = min(first, other.address), max(last, other.address + other.num_bytes)
        if tensor.numel() or not other.num_bytes:
            spans[_storage(tensor)] = Span(first, last - first)
    return spans


def write_calls(calls: Iterable[Call], path: Path) -> None:
    """Write what ``rerun.cpp`` reads."""
    with open(path, "wb") as file:
        for call in calls:
            file.writelines(call.lines())


def read_results(calls: Sequence[Call], path: Path) -> list[Result]:
    """What ``rerun.cpp`` wrote: as many results as it came to."""
    found = []
    with open(path, "rb") as file:
        for call in calls:
            outcome = file.readline().decode().rstrip("\n")
            buffers = [bytearray(file.read(len(memory))) for memory in call.before]
            if [len(x) for x in buffers] != [len(x) for x in call.before] or not outcome:
                break
            found.append(Result(outcome, buffers))
    return found
