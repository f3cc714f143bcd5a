"""The model of most tests here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hisparse.transformers import disable
from tests.transformers.hf_models import model


@pytest.fixture
def net() -> Iterator[Any]:
    """A tiny Llama with its own attention."""
    yield model("llama")
    disable(model("llama"))
