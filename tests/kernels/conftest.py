"""Every kernel test runs once for each implementation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hisparse.kernels._impl import IMPLEMENTATIONS


@pytest.fixture(params=IMPLEMENTATIONS, scope="session")
def impl(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """PyTorch's threads wait for each other: on busy cores that takes longer than the tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
