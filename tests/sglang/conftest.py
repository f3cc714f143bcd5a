"""No test sees the features of another one's server."""

from __future__ import annotations

import pytest

from hisparse.sglang.features import IN_USE


@pytest.fixture(autouse=True)
def plain_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IN_USE, "server")
