"""Launches of operations on real tensors, each with its machine code and the memory that it gets.

CUDA C++ is launched by its own host code, built for fibers; Triton's launches are taken where
Triton would run them.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from hisparse.kernels import operation, triton_common
from hisparse.kernels.attention import triton_splits
from hisparse.kernels.build import cuda as build_cuda
from hisparse.kernels.build.cache import CACHE, is_intact, private_folder, put
from hisparse.kernels.build.compiler import SOURCES, binding_flags, digest_of
from hisparse.kernels.operation import IMPLEMENTATIONS
from scripts.compile_cuda import parse
from tests.fake_cuda.device import PROCESSORS, SHARED_BYTES
from tests.fake_cuda.launches import Launch
from tests.fake_cuda.variants import Variant, variant_of
from tests.kernels.fibers.build import fiber_library
from tests.kernels.timing.code import Program, programs
from tests.kernels.timing.machine import Launched, Region
from tests.kernels.triton_compile import compiled_with_report, disassembled, reported

__all__ = ["Recorded", "recorded"]

ARCH, RECORDED = 90, "recorded"
_CALLBACK = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_uint, ctypes.c_void_p,
    ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint,
)  # fmt: skip


class Compiled(NamedTuple):
    """Machine code of a kernel, and what ptxas says: registers of a thread, bytes of spills, bytes
    of shared memory of a block beside what its launch asks for.
    """

    program: Callable[[], Program]
    registers: int
    spills: int
    shared: int


class Recorded(NamedTuple):
    """A launch, its code, and the tensors that the call was given."""

    launch: Launched
    code: Compiled
    memory: list[Region]


@contextmanager
def recorded(run: Callable[[Recorded], None], host: Callable[[Tensor], bool]) -> Iterator[None]:
    """Within it, ``impl=RECORDED`` calls ``run`` in place of each kernel on a GPU.

    Args:
        run: called while the launch's tensors live.
        host: whether a tensor is in host memory.
    """
    memory: list[Region] = []
    failed: list[Exception] = []

    def told(
        kernel: int, grid: Any, threads: int, params: int, size: int, shared: int, cluster: int
    ) -> None:
        try:
            name = _kernel_name(kernel)
            blocks = (grid[0], grid[1], grid[2])
            given = ctypes.string_at(params, size)
            launch = Launched(name, given, blocks, threads, shared, cluster)
            run(Recorded(launch, _cuda_kernels()[name], memory))
        except Exception as error:  # C++ is between this and who called
            failed.append(error)

    def triton_run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | options
        variant = variant_of(Launch(kernel.__name__, None, 1, kernel, arguments), ARCH)
        memory[:] = _regions(tree_leaves(tuple(arguments.values())), host)
        code, threads, shared = _triton_kernel(variant)
        blocks = (*(int(n) for n in grid), 1, 1)[:3]
        params = _packed(dict(variant.signature), arguments)
        run(Recorded(Launched(kernel.__name__, params, blocks, threads, shared), code, memory))

    library = _Library(
        fiber_library(), lambda given: memory.__setitem__(slice(None), _regions(given, host))
    )
    properties = SimpleNamespace(
        multi_processor_count=PROCESSORS, shared_memory_per_block_optin=SHARED_BYTES[9, 0]
    )
    callback = _CALLBACK(told)
    fiber_library()["set_recorder"](ctypes.cast(callback, ctypes.c_void_p).value)
    fiber_library()["set_processors"](PROCESSORS)
    with (
        patch.object(build_cuda, "cuda_library", lambda: library),
        patch.object(operation, "why_no_triton", lambda: None),
        patch.object(torch.cuda, "get_device_properties", lambda *device: properties),
        patch.object(torch.cuda, "get_device_capability", lambda *device: divmod(ARCH, 10)),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        patch.object(triton_common, "num_processors", lambda device: PROCESSORS),
        patch.object(triton_splits, "num_processors", lambda device: PROCESSORS),
        patch.object(JITFunction, "run", lambda *args, **each: triton_run(*args, **each)),
        patch.dict(IMPLEMENTATIONS, {RECORDED: lambda op, place: op.function("cuda")}),
    ):
        try:
            yield
        finally:
            fiber_library()["set_recorder"](0)
            fiber_library()["set_processors"](-1)
    if failed:
        raise failed[0]


class _Library:
    """The library of fibers, which tells of its calls' tensors."""

    def __init__(self, library: Any, tell: Callable[[Any], None]) -> None:
        self._library, self._tell = library, tell

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self._tell(arguments)
            return self._library[name](*arguments)

        return call


def _regions(given: Any, host: Callable[[Tensor], bool]) -> list[Region]:
    found = {}
    for tensor in given:
        if isinstance(tensor, Tensor) and tensor.numel():
            storage = tensor.untyped_storage()
            start, size = storage.data_ptr(), storage.nbytes()
            data = np.frombuffer((ctypes.c_uint8 * size).from_address(start), dtype=np.uint8)
            found[start] = Region(start, data, host(tensor))
    return list(found.values())


@functools.cache
def _kernel_name(address: int) -> str:
    """The mangled name of the kernel at an address of a library of fibers."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, _, offset, *_, file = line.split()
        start, end = (int(each, 16) for each in where.split("-"))
        if start <= address < end:
            break
    place = address - start + int(offset, 16)
    _, mangled = max(each for each in _kernels_of(file) if each[0] <= place)
    # The host's compiler marks a function of one file by an L.
    return re.sub(r"^_ZN8hisparseL", "_ZN8hisparse", mangled)


@functools.cache
def _kernels_of(library: str) -> list[tuple[int, str]]:
    listed = subprocess.run(["nm", library], capture_output=True, text=True, check=True).stdout
    each = (line.split() for line in listed.splitlines())
    return [(int(name[0], 16), name[2]) for name in each if len(name) == 3 and "_kernel" in name[2]]


@functools.cache
def _cuda_kernels() -> Mapping[str, Compiled]:
    """Kernels of all CUDA sources by mangled name; only changed sources are compiled again."""
    includes = [f"-I{SOURCES}", f"-I{SOURCES / 'include'}", *binding_flags()[0]]
    flags = ["-std=c++17", "-O3", "-Xptxas", "-v", f"-gencode=arch=compute_{ARCH},code=sm_{ARCH}"]
    command = [str(build_cuda.find_nvcc()), *flags, *includes, "-cubin"]
    sources, every = build_cuda.cuda_sources()
    headers = [path for path in every if path not in sources]
    found = {}
    for source in sources:
        cubin = CACHE / f"{source.stem}-{digest_of([source, *headers], *command)}.cubin"
        log = cubin.with_suffix(".log")
        if not is_intact(log):
            private_folder(CACHE)
            with tempfile.TemporaryDirectory(dir=CACHE) as folder:
                made = Path(folder) / cubin.name
                run = subprocess.run(
                    [*command, str(source), "-o", str(made)],
                    capture_output=True, text=True, check=True,
                )  # fmt: skip
                put(made, cubin)
                made.with_suffix(".log").write_text(run.stderr)
                put(made.with_suffix(".log"), log)
        code = programs(cubin.read_bytes(), disassembled(cubin.read_bytes()))
        for each in parse(source.name, log.read_text()):
            program = code[each.kernel]
            found[each.kernel] = Compiled(program, each.registers, each.spills, each.shared)
    return found


@functools.cache
def _triton_kernel(variant: Variant) -> tuple[Compiled, int, int]:
    """The kernel, threads of a block, and the bytes of shared memory that its launch asks for."""
    source = ASTSource(
        fn=variant.kernel,
        signature=dict(variant.signature),
        constexprs=dict(variant.constants),
        attrs={at: [["tt.divisibility", by]] for at, by in variant.attributes},
    )
    target = GPUTarget("cuda", ARCH, 32)
    compiled, log = compiled_with_report(source, target, dict(variant.options))
    cubin, metadata = compiled.asm["cubin"], compiled.metadata
    (program,) = programs(cubin, disassembled(cubin)).values()
    code = Compiled(program, *reported(log), 0)
    return code, 32 * metadata.num_warps, metadata.shared


def _packed(signature: Mapping[str, Any], arguments: Mapping[str, Any]) -> bytes:
    """Parameters as Triton's launcher passes them: those that are no constants, in order."""
    data = bytearray()
    formats = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "fp32": "f", "u64": "Q"}

    def add(kind: Any, value: Any) -> None:
        if isinstance(kind, tuple):
            for each, own in zip(kind, value, strict=True):
                add(each, own)
        elif kind != "constexpr":
            value = value.data_ptr() if isinstance(value, Tensor) else value
            letter = "Q" if kind.startswith("*") else formats[kind]
            data.extend(bytes(-len(data) % struct.calcsize(letter)))
            data.extend(struct.pack("<" + letter, value))

    for name, kind in signature.items():
        add(kind, arguments.get(name))
    return bytes(data) + bytes(-len(data) % 8 + 16)
