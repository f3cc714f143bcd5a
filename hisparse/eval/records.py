"""What an evaluation has found so far, on disk: a run that was interrupted goes on from it."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from hisparse.algorithms import build_algorithm
from hisparse.eval.method import Method

__all__ = ["Key", "Records", "model_digest"]


class Key(NamedTuple):
    """What a record is of.

    Attributes:
        document: its name.
        method: its name.
        budget: tokens.
        config: digest of all settings, defaults included: they may be others in another release.
    """

    document: str
    method: str
    budget: int
    config: str

    @classmethod
    def of(cls, document: str, method: Method) -> Key:
        """A method's on a document."""
        settings = f"{method.config!r} {build_algorithm(method.config)!r}"
        digest = f"{zlib.crc32(settings.encode()):08x}"
        return cls(document, method.name, method.config.budget, digest)


class Records:
    """``records.jsonl``, a line for each document and method.

    Args:
        folder: where it lies.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "records.jsonl"

    def read(self) -> dict[Key, dict[str, Any]]:
        """All of them; a last line that was not written to its end is cut off."""
        if not self._path.exists():
            return {}
        whole, _, torn = self._path.read_text(encoding="utf-8").rpartition("\n")
        if torn:
            self._path.write_text(whole + "\n" if whole else "", encoding="utf-8")
        records = map(json.loads, whole.splitlines())
        return {Key(*(record[name] for name in Key._fields)): record for record in records}

    def append(self, record: dict[str, Any]) -> None:
        """Write one more, with the fields of its key."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def model_digest(model: Any) -> str:
    """Tells models apart that have one name: by configuration and the first weights of each tensor.

    Args:
        model: of transformers.
    """
    digest = zlib.crc32(model.config.to_json_string().encode())
    for name, weight in model.named_parameters():
        digest = zlib.crc32(name.encode(), digest)
        first = weight.detach().flatten()[:64].float().cpu()
        digest = zlib.crc32(first.numpy().tobytes(), digest)
    return f"{digest:08x}"
