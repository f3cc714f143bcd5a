"""Records of an evaluation on disk, from which an interrupted run resumes."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from hisparse.algorithms import build_algorithm
from hisparse.errors import ConfigError
from hisparse.eval.method import Method
from hisparse.eval.result_types import RecordLine
from hisparse.options import check_fields, parse_object, read_text


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
        """Read all records; cut off the last line if it is incomplete.

        Raises:
            ConfigError: the file cannot be read, or a line is no record.
        """
        if not self._path.exists():
            return {}
        whole, _, torn = read_text(self._path, "--out").rpartition("\n")
        if torn:
            # Counted in the file: reading converts line ends, which an editor may have changed.
            os.truncate(self._path, self._path.read_bytes().rfind(b"\n") + 1)
        lines = whole.split("\n") if whole else []
        records = [self._parse(number, line) for number, line in enumerate(lines, 1)]
        return {
            RecordKey(*(record[name] for name in RecordKey._fields)): record for record in records
        }

    def _parse(self, number: int, line: str) -> dict[str, Any]:
        where = f"{str(self._path)!r} line {number}"
        try:
            record = parse_object(line, where, '{"document": "", ...}')
            check_fields(where, record, RecordLine)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; delete this line to evaluate its document and method again"
            ) from None
        return record

    def append(self, record: dict[str, Any]) -> None:
        """Append a record, which includes the fields of its key."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
