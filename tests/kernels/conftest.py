"""Every kernel test runs once for each implementation that can run here.

With HISPARSE_TEST_CUDA=1 (``make gpu-check``) it runs on the GPU instead. With
HISPARSE_TEST_CUDA=proxy and TRITON_INTERPRET=1 (``test_triton.py``) it runs through the GPU's proxy
too, but CUDA kernels run on fibers and Triton's on its interpreter.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from hisparse.kernels import operation
from hisparse.kernels.build import cpu as _build_cpu
from hisparse.kernels.build import cuda as _build_cuda
from hisparse.kernels.operation import IMPLEMENTATIONS
from tests.kernels.fibers import build, orders
from tests.kernels.gpu import on_gpu
from tests.kernels.verified import verified

ON_FIBERS = "cuda-on-cpu"
UNVERIFIED = "cuda-on-cpu-unverified"
# The tests whose operations are CUDA C++; the others' are in Triton.
CUDA_TESTS = {
    "test_append_tokens",
    "test_diff_tables",
    "test_quantized_transfer",
    "test_raw_queries",
    "test_lru",
    "test_page_sketch",
    "test_rebalance",
    "test_select",
    "test_select_inputs",
    "test_transfer",
    "test_transfer_layers",
}


def pytest_itemcollected(item: pytest.Item) -> None:
    """What runs on fibers runs under more orders of threads in sweeps."""
    if ON_FIBERS in item.name or "fibers" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.sweeps)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = metafunc.definition.iter_markers("parametrize")
    if "impl" not in metafunc.fixturenames or any(mark.args[0] == "impl" for mark in marks):
        return
    names = ["reference", "cpu"]
    in_triton = "page_score" in metafunc.definition.name
    if metafunc.module.__name__.rpartition(".")[2] in CUDA_TESTS and not in_triton:
        names.append(ON_FIBERS)
    if os.environ.get("HISPARSE_TEST_CUDA") in ("1", "proxy"):
        names = [on_gpu.ON_GPU]
    metafunc.parametrize("impl", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def impl(request: pytest.FixtureRequest) -> Iterator[str]:
    name = str(request.param)
    with pytest.MonkeyPatch.context() as patch:
        if name == ON_FIBERS:
            run_on_fibers(patch)
        elif name == on_gpu.ON_GPU:
            if os.environ["HISPARSE_TEST_CUDA"] == "proxy":
                run_proxy_on_fibers(patch)
            patch.setitem(
                IMPLEMENTATIONS,
                on_gpu.ON_GPU,
                lambda op, place: verified(op.name, on_gpu.on_gpu(op)),
            )
        yield name


@pytest.fixture
def fibers(monkeypatch: pytest.MonkeyPatch) -> str:
    """The CUDA operations on fibers, as an implementation that verifies its indices."""
    run_on_fibers(monkeypatch)
    return ON_FIBERS


@pytest.fixture
def unverified(fibers: str) -> str:
    """The CUDA operations on fibers as they are served: nothing is read back."""
    return UNVERIFIED


def run_on_fibers(patch: pytest.MonkeyPatch, library: Any = None) -> None:
    """Make implementations of a library on fibers; None: that of the real sources."""
    library = library or build.fiber_library()
    patch.setattr(_build_cuda, "cuda_library", lambda: library)
    # Triton's kernels do not run on fibers.
    patch.setattr(operation, "why_no_triton", lambda: "kernels run on fibers")
    patch.setitem(
        IMPLEMENTATIONS, ON_FIBERS, lambda op, place: verified(op.name, orders.in_orders(op))
    )
    patch.setitem(IMPLEMENTATIONS, UNVERIFIED, lambda op, place: orders.in_orders(op))


def run_proxy_on_fibers(patch: pytest.MonkeyPatch) -> None:
    """Run the GPU's proxy without a GPU: its copies lie in host memory."""
    patch.setattr(_build_cuda, "cuda_library", build.fiber_library)
    patch.setattr(on_gpu, "DEVICE_MEMORY", {})
    patch.setattr(on_gpu, "PINNED_MEMORY", {})
    patch.setattr(torch.cuda, "synchronize", lambda: None)
    shuffle_programs(patch)


def shuffle_programs(patch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter run the programs of each launch in an order of its own."""
    from triton.runtime.interpreter import interpreter_builder as builder

    set_dim, set_index, random = builder.set_grid_dim, builder.set_grid_idx, Random(0)
    left: list[tuple[int, ...]] = []

    def begin(*grid: int) -> None:
        set_dim(*grid)
        left[:] = itertools.product(*map(range, grid))
        random.shuffle(left)

    patch.setattr(builder, "set_grid_dim", begin)
    patch.setattr(builder, "set_grid_idx", lambda *index: set_index(*left.pop()))


#: Whether ``torch.empty`` gives NaN, and the largest integers. On a GPU PyTorch would refuse some
#: operators then.
POISONED = not torch.cuda.is_available()


@pytest.fixture(autouse=True, scope="package")
def poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(POISONED)
    yield
    torch.use_deterministic_algorithms(False)


def check_unwritten(impl: str, scores: Tensor, absent: Tensor) -> None:
    """Nobody reads ``scores[absent]``, and only plain PyTorch writes any."""
    if POISONED and impl != "reference":
        assert scores[absent].isnan().all()


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """PyTorch's threads wait for each other: on busy cores that takes longer than the tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


#: A small library to build in place of the real one, and how.
FLAGS = ["-std=c++17", "-O0", "-fPIC"]
SOURCE = """
#include <tvm/ffi/function.h>
int forty_two() { return 42; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(forty_two, forty_two);
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small library to build in place of the real one, into an empty cache."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "answer.cpp").write_text(SOURCE)
    monkeypatch.setattr(_build_cpu, "_SOURCES", folder)
    monkeypatch.setattr(_build_cpu, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(_build_cpu, "_FLAGS", FLAGS)
    _build_cpu.cpu_library.cache_clear()
    yield folder
    _build_cpu.cpu_library.cache_clear()
