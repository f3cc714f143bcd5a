"""Writes tensors and their checksums to a safetensors file, and reads them back verified."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hisparse.errors import ConfigError, HiSparseError, one_line, quoted, shorten
from hisparse.options import parse_object
from hisparse.private_files import open_private

__all__ = ["TensorFile", "write_tensors"]

#: Entries of the metadata besides those of the caller.
_OWN = ("format", "checksums", "digest")


def write_tensors(
    path: Path, format_name: str, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> None:
    """Write a file that is either complete or absent, whenever the process or the machine stops.

    Only this user can read it (mode 600).

    Args:
        path: the file; an existing file is replaced when the new one is on the disk.
        format_name: name and version of the contents.
        metadata: texts by name.
        tensors: contiguous tensors in host memory, by name.

    Raises:
        HiSparseError: the file cannot be written; an existing file is as it was.
    """
    checksums = {name: _checksum(tensor) for name, tensor in tensors.items()}
    entries = {**metadata, "format": format_name, "checksums": json.dumps(checksums)}
    temporary = path.with_name(f".{uuid4().hex}.tmp")
    try:
        # With mode 600, which the file keeps: it holds K and V of prompts.
        os.close(open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        save_file(dict(tensors), str(temporary), entries | {"digest": _digest(entries)})
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise HiSparseError(f"cannot write {str(path)!r}: {one_line(error)}") from None
    finally:
        temporary.unlink(missing_ok=True)


class TensorFile:
    """An open file of :func:`write_tensors`. Close it with a ``with`` block.

    Checksums find damage of every kind, but not changes that somebody makes on purpose: those need
    a signature.

    Args:
        path: the file.
        format_name: the only format to accept.
        expected: what to give instead, for messages ("a file that ... wrote").

    Raises:
        ConfigError: the file cannot be opened, has another format, or its metadata are damaged.
    """

    def __init__(self, path: Path, format_name: str, expected: str) -> None:
        self._name, self._expected = repr(str(path)), expected
        try:
            if path.exists() and not path.is_file():
                raise self._error("not a regular file")
            open_file: Any = safe_open
            self._file = open_file(str(path), "pt")
            entries: dict[str, str] = self._file.metadata() or {}
            names = set(self._file.keys())
        except (OSError, SafetensorError) as error:
            raise self._error(one_line(error)) from None
        if entries.get("format") != format_name:
            raise self._error(f"got format {quoted(entries.get('format'))}, not {format_name!r}")
        if entries.get("digest") != _digest(entries) or "checksums" not in entries:
            raise self._error("its metadata do not match their digest: the file is damaged")
        self._checksums = parse_object(entries["checksums"], f"{self._name}: checksums", "{}")
        if names != self._checksums.keys():
            raise self._error("its tensors are not those with checksums: the file is damaged")
        self._unread = names
        #: Texts by name, as given to :func:`write_tensors`.
        self.metadata = {name: text for name, text in entries.items() if name not in _OWN}

    def __enter__(self) -> TensorFile:
        self._file.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.__exit__(kind, error, trace)

    def __contains__(self, name: str) -> bool:
        return name in self._checksums

    def read(self, name: str, dtype: torch.dtype, shape: Sequence[int | None]) -> Tensor:
        """Read a tensor and verify its checksum.

        Args:
            name: name of the tensor.
            dtype: the expected dtype.
            shape: the expected size of each dimension; None where any size is right.

        Raises:
            ConfigError: the tensor is absent or damaged, or has another dtype or shape.
        """
        if name not in self._checksums:
            raise self._error(f"tensor {name!r} is absent")
        tensor = self._verified(name)
        fits = tensor.dtype == dtype and len(tensor.shape) == len(shape)
        if not fits or any(n not in (None, m) for n, m in zip(shape, tensor.shape, strict=True)):
            sizes = ", ".join("any" if n is None else str(n) for n in shape)
            raise self._error(
                f"tensor {name!r}: got {tensor.dtype} {shorten(tensor.shape)}, expected {dtype} "
                f"[{sizes}]"
            )
        return tensor

    def verify_rest(self) -> None:
        """Verify the checksums of all tensors that were not read.

        Raises:
            ConfigError: a tensor is damaged.
        """
        for name in sorted(self._unread):
            self._verified(name)

    def _verified(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._file.get_tensor(name)
            checksum = _checksum(tensor)
        except (SafetensorError, RuntimeError, ValueError, TypeError) as error:
            raise self._error(f"tensor {quoted(name)}: {one_line(error)}") from None
        if checksum != self._checksums[name]:
            raise self._error(
                f"tensor {quoted(name)} does not match its checksum: the file is damaged"
            )
        self._unread.discard(name)
        return tensor

    def _error(self, got: str) -> ConfigError:
        return ConfigError(f"{self._name}: {got}; expected {self._expected}")


def _checksum(tensor: Tensor) -> str:
    """Checksum of dtype, shape and bytes."""
    digest = xxhash.xxh3_128(f"{tensor.dtype} {list(tensor.shape)}".encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _digest(entries: Mapping[str, str]) -> str:
    """Checksum of all metadata but the digest itself, in whichever order they are."""
    content = sorted((name, text) for name, text in entries.items() if name != "digest")
    return xxhash.xxh3_128(json.dumps(content).encode()).hexdigest()


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
