"""Checksums of a changed file of tensors, so that a change gets past them to the code behind."""

from __future__ import annotations

import json
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load

from hisparse.transformers.tensor_file import _checksum, _digest

__all__ = ["is_sealed", "parts", "sealed"]


def parts(data: bytes) -> tuple[dict[str, Any], bytes] | None:
    """Header and content of a safetensors file, or None if it has no header of texts."""
    size = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + size])
    except (ValueError, RecursionError):
        return None
    texts = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        return None
    return header, data[8 + size :]


def sealed(header: dict[str, Any], content: bytes, *, checksums: bool) -> bytes:
    """A file whose digest fits its metadata, and whose checksums fit its tensors if wanted."""
    texts = header.get("__metadata__")
    if isinstance(texts, dict) and all(isinstance(text, str) for text in texts.values()):
        if checksums and (found := _checksums(_file(header, content))):
            texts["checksums"] = found
        texts["digest"] = _digest(texts)
    return _file(header, content)


def is_sealed(data: bytes) -> bool:
    """Whether all checksums of a file fit."""
    if (found := parts(data)) is None:
        return False
    texts = found[0]["__metadata__"]
    checksums = _checksums(data)
    return (
        texts.get("digest") == _digest(texts)
        and checksums is not None
        and json.loads(texts["checksums"]) == json.loads(checksums)
    )


def _checksums(data: bytes) -> str | None:
    """Checksums of all tensors, or None where safetensors refuses the file."""
    try:
        return json.dumps({name: _checksum(tensor) for name, tensor in load(data).items()})
    except (SafetensorError, RuntimeError, ValueError, TypeError, KeyError):
        return None


def _file(header: dict[str, Any], content: bytes) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content
