"""Every kernel test runs once for each implementation that can run here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hisparse.kernels import _build_cuda, _impl, cuda_checks
from tests.kernels.fibers import build, orders

ON_FIBERS = "cuda-on-cpu"
# The tests whose operations are CUDA C++; the others' are in Triton.
_CUDA_TESTS = {
    "test_lru_diff",
    "test_page_table",
    "test_rebalance",
    "test_transfer",
    "test_transfer_layers",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = metafunc.definition.iter_markers("parametrize")
    if "impl" not in metafunc.fixturenames or any(mark.args[0] == "impl" for mark in marks):
        return
    names = ["reference", "cpu"]
    if metafunc.module.__name__.rpartition(".")[2] in _CUDA_TESTS:
        names.append(ON_FIBERS)
    metafunc.parametrize("impl", names, indirect=True, scope="session")


@pytest.fixture(scope="session")
def impl(request: pytest.FixtureRequest) -> Iterator[str]:
    name = str(request.param)
    if name != ON_FIBERS:
        yield name
        return
    with pytest.MonkeyPatch.context() as patch:
        run_on_fibers(patch)
        yield name


@pytest.fixture
def fibers(monkeypatch: pytest.MonkeyPatch) -> str:
    """The CUDA operations on fibers, as an implementation; checked mode is on."""
    run_on_fibers(monkeypatch)
    return ON_FIBERS


def run_on_fibers(patch: pytest.MonkeyPatch, library: Any = None) -> None:
    """Make "cuda-on-cpu" an implementation: the given library, or that of the real sources."""
    library = library or build.fiber_library()
    patch.setattr(_build_cuda, "cuda_library", lambda: library)
    patch.setattr(cuda_checks, "_checked", True)
    patch.setitem(_impl._LOADERS, ON_FIBERS, lambda devices: orders)


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """PyTorch's threads wait for each other: on busy cores that takes longer than the tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
