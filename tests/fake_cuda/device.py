"""A CUDA device of fake tensors: shapes, dtypes and devices as on a GPU, and no memory.

PyTorch's own operators run on fake tensors. Both exits to a GPU, the library of CUDA kernels and
the launch of a Triton kernel, go to a :class:`tests.fake_cuda.launches.Launches`. All stand-ins
for what needs a driver are in this file.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

from hisparse.cache import allocate, manager
from hisparse.kernels import operation
from hisparse.kernels.attention import op as attention
from hisparse.kernels.build import cuda as build_cuda
from hisparse.kernels.build.cache import CACHE
from hisparse.kernels.build.compiler import digest_of, produce_from_objects
from hisparse.kernels.build.cpu import cxx_compiler
from tests.fake_cuda.launches import Launches

CUDA = torch.device("cuda:0")
#: An H100's; Triton's attention divides its work by it.
PROCESSORS = 132
#: Shared memory of a block, by compute capability.
SHARED_BYTES = {(8, 0): 163 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}
_CALLED_BY_CUDA = SimpleNamespace(
    host_function=lambda keeps: 0,
    make_host_calls=lambda threads: 0,
    drop_host_calls=lambda calls: None,
    prepare_attention=lambda *given: 0,
    take_host_error=lambda calls: "",
)
_GUARD = Path(__file__).parent / "guard.cpp"


@contextmanager
def fake_cuda(capability: tuple[int, int] = (9, 0)) -> Iterator[Launches]:
    """Within it, tensors are fake and may lie on ``cuda:0``; everything that launches is kept.

    Operators on tensors of several devices raise, and so does reading a tensor on the host.

    Args:
        capability: compute capability of the device.
    """
    from triton.runtime.jit import JITFunction

    from hisparse.kernels.attention import triton_splits

    load_guard()
    launches = Launches(PinnedMemory())
    properties = SimpleNamespace(
        multi_processor_count=PROCESSORS, shared_memory_per_block_optin=SHARED_BYTES[capability]
    )
    stand_ins = [
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "get_device_properties", lambda *device: properties),
        patch.object(torch.cuda, "get_device_capability", lambda *device: capability),
        patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        patch.dict(triton_splits._made, clear=True),
        patch.object(operation, "why_no_triton", lambda: None),
        patch.object(torch, "as_tensor", _as_tensor),
        # It would follow from is_available: constants would be put on a real device.
        patch.object(FakeTensorMode, "avoid_device_init", True),
        patch.object(FakeTensor, "data_ptr", address, create=True),
        patch.object(build_cuda, "cuda_library", lambda: launches.library),
        patch.object(manager, "make_stream", lambda device: launches.aside),
        # Calls that CUDA makes in a stream are counted, and not made.
        patch.object(attention, "cpu_library", lambda: _CALLED_BY_CUDA),
        patch.object(JITFunction, "run", lambda *args, **each: launches.run_triton(*args, **each)),
    ]
    zeros = allocate.zeros
    stand_ins += [
        patch.object(module, "zeros", launches.pinned.zeros)
        for name, module in list(sys.modules.items())
        if name.startswith("hisparse.") and getattr(module, "zeros", None) is zeros
    ]
    with FakeTensorMode(), launches:
        for stand_in in stand_ins:
            stand_in.start()
        try:
            yield launches
        finally:
            for stand_in in reversed(stand_ins):
                stand_in.stop()


class PinnedMemory:
    """Remembers which fake tensors lie in page-locked memory."""

    def __init__(self) -> None:
        self._storages: set[int] = set()
        self._kept: list[Tensor] = []

    def zeros(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        pin: bool = False,
        ranks: object = None,
    ) -> Tensor:
        """In place of ``hisparse.cache.allocate.zeros``: fake memory, however much.

        Memory that ranks share is that of one rank here.
        """
        tensor = torch.zeros(shape, dtype=dtype, device=device)
        if pin:
            self.add(tensor)
        return tensor

    def add(self, tensor: Tensor) -> None:
        # Held, for another storage may get the number of a storage that is gone.
        self._kept.append(tensor)
        self._storages.add(tensor.untyped_storage()._cdata)

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages


def address(tensor: Tensor) -> int:
    """In place of ``data_ptr``: views of one storage are as far apart as they would be."""
    storage = tensor.untyped_storage()._cdata
    # A storage begins at a multiple of 256 bytes, as those of PyTorch do on a GPU.
    return (storage << 8) + tensor.storage_offset() * tensor.element_size()


@functools.cache
def load_guard() -> None:
    """Let Python index CUDA tensors in a build of PyTorch without CUDA."""
    if torch.version.cuda is not None:
        return
    home = Path(torch.__file__).parent
    command = [cxx_compiler(), "-std=c++20", "-shared", "-fPIC", f"-I{home / 'include'}"]
    command += [str(_GUARD), f"-L{home / 'lib'}", "-lc10"]
    target = CACHE / f"cuda-guard-{digest_of([_GUARD], *command, torch.__version__)}.so"
    produce_from_objects("a stand-in for CUDA's device guard", {}, command, target)
    ctypes.CDLL(str(target))


_real_as_tensor = torch.as_tensor


def _as_tensor(data: Any, *args: Any, **options: Any) -> Tensor:
    interface = getattr(data, "__cuda_array_interface__", None)
    if isinstance(data, Tensor) or interface is None:
        return _real_as_tensor(data, *args, **options)
    # Page-locked memory as the GPU addresses it: a CUDA tensor like any other.
    return torch.empty(interface["shape"], dtype=torch.uint8, device=CUDA)
