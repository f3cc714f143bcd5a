"""A context is saved to a disk that is full: one line, and the older file stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hisparse.errors import HiSparseError
from hisparse.transformers import disable, enable
from tests.processes import largest_file
from tests.transformers.hf_models import SMALL, model, prompt


def test_a_context_keeps_the_older_file(tmp_path: Path) -> None:
    net, ids, path = model("llama"), prompt(100, seed=1), tmp_path / "context.safetensors"
    cache = enable(net, SMALL, max_length=200)
    try:
        with torch.no_grad():
            net(ids, past_key_values=cache)
    finally:
        disable(net)
    cache.save(path, ids)
    assert path.stat().st_mode & 0o777 == 0o600
    whole = path.read_bytes()
    with largest_file(len(whole) // 2), pytest.raises(HiSparseError) as error:
        cache.save(path, ids)
    assert str(error.value).startswith(f"cannot write {str(path)!r}: ")
    assert "File too large" in str(error.value) and "\n" not in str(error.value)
    assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path]
