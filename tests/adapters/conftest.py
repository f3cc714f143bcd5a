"""Replaces the attention libraries by an interpreter of their calls."""

from __future__ import annotations

import sys

import pytest

from tests.adapters.interpreter import Interpreter


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Interpreter:
    """An interpreter in place of the libraries' modules, installed or not."""
    made = Interpreter()
    for name, module in made.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return made
