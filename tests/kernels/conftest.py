"""Every kernel test runs once for each implementation."""

from __future__ import annotations

import pytest

from hisparse.kernels._impl import IMPLEMENTATIONS


@pytest.fixture(params=IMPLEMENTATIONS, scope="session")
def impl(request: pytest.FixtureRequest) -> str:
    return str(request.param)
