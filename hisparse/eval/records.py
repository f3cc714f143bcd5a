"""Records of an evaluation on disk, from which an interrupted run resumes."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from hisparse.algorithms import build_algorithm
from hisparse.eval.method import Method

__all__ = ["RecordKey", "Records", "model_digest"]


class RecordKey(NamedTuple):
    """Identifies a record.

    Attributes:
        document: name of the document.
        method: name of the method.
        budget: tokens.
        config: digest of all settings, with defaults, which may change between releases.
    """

    document: str
    method: str
    budget: int
    config: str

    @classmethod
    def of(cls, document: str, method: Method) -> RecordKey:
        """The key of a method on a document."""
        settings = f"{method.config!r} {build_algorithm(method.config)!r}"
        digest = f"{zlib.crc32(settings.encode()):08x}"
        return cls(document, method.name, method.config.budget, digest)


class Records:
    """The file ``records.jsonl``, a line for each document and method.

    Args:
        folder: contains the file.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "records.jsonl"

    def read(self) -> dict[RecordKey, dict[str, Any]]:
        """Read all records; truncate the file if its last line is incomplete."""
        if not self._path.exists():
            return {}
        whole, _, torn = self._path.read_text(encoding="utf-8").rpartition("\n")
        if torn:
            self._path.write_text(whole + "\n" if whole else "", encoding="utf-8")
        records = map(json.loads, whole.splitlines())
        return {
            RecordKey(*(record[name] for name in RecordKey._fields)): record for record in records
        }

    def append(self, record: dict[str, Any]) -> None:
        """Append a record, which includes the fields of its key."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def model_digest(model: Any) -> str:
    """A digest of the configuration and the first weights of each tensor.

    It distinguishes models of the same name.

    Args:
        model: a transformers model.
    """
    digest = zlib.crc32(model.config.to_json_string().encode())
    for name, weight in model.named_parameters():
        digest = zlib.crc32(name.encode(), digest)
        first = weight.detach().flatten()[:64].float().cpu()
        digest = zlib.crc32(first.numpy().tobytes(), digest)
    return f"{digest:08x}"
