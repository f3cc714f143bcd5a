"""The libraries that adapters call, read by an interpreter."""

from __future__ import annotations

import sys

import pytest

from tests.adapters.interpreter import Interpreter


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Interpreter:
    """In the place of the libraries' modules, installed or not."""
    made = Interpreter()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return made
