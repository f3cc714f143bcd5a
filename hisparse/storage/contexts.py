"""Contexts: sequences of pages with attributes, in an SQLite file of their own beside the index.

The index can be made again from the segments; attributes cannot. A store without this file has
the same pages, of no context.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hisparse.errors import ConfigError, quoted
from hisparse.storage.context_tree import ContextTree
from hisparse.storage.namespace import Namespace

#: ``attributes -> bool``: whether pages of a context with these attributes may be used.
Filter = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True, kw_only=True)
class Context:
    """A sequence of tokens that somebody stored.

    Attributes:
        id: number of the context in its store.
        num_tokens: tokens whose pages were stored; some may have left the store since.
        attributes: what it was stored with.
        created: when it was stored, seconds since 1970.
    """

    id: int
    num_tokens: int
    attributes: Mapping[str, Any]
    created: float


class Contexts:
    """The contexts of one namespace. Methods may be called from any thread.

    Args:
        folder: the folder of the store.
        namespace: of the pages.

    Raises:
        HiSparseError: the file is damaged or of another version, cannot be opened, or others can
            write to it or to the folder.
    """

    def __init__(self, folder: Path, namespace: Namespace) -> None:
        self._namespace, self._tree = namespace, ContextTree(folder)

    def add(
        self, keys: Sequence[str], num_tokens: int, attributes: Mapping[str, Any]
    ) -> Context | None:
        """Add a context; one with the same pages and attributes is returned as it is.

        Args:
            keys: of its pages in order, as :func:`page_keys` makes them.
            num_tokens: tokens of these pages.
            attributes: a JSON object.

        Returns:
            The context; None without a page.

        Raises:
            ConfigError: ``attributes`` is no JSON object.
            HiSparseError: the file cannot be written.
        """
        text, raw = _attributes_text(attributes), [bytes.fromhex(key) for key in keys]
        if not raw:
            return None
        with self._tree.transaction() as database:
            end = [self._tree.extend(raw), len(raw)]
            rule = "branch = ? AND num_pages = ? AND attributes = ? AND namespace = ?"
            known = self._select(rule, [*end, text, self._namespace.key_bytes])
            if known:
                return known[0]
            number = database.execute(
                "INSERT INTO contexts (namespace, num_tokens, attributes, created, branch, "
                "num_pages) VALUES (?, ?, ?, ?, ?, ?)",
                [self._namespace.key_bytes, num_tokens, text, time.time(), *end],
            ).lastrowid
            return self._select("id = ?", [number])[0]

    def all(self) -> list[Context]:
        """Every context, the oldest first."""
        return self._select("namespace = ? ORDER BY id", [self._namespace.key_bytes])

    def longest(self, keys: Sequence[str], accept: Filter) -> int:
        """Length of the longest prefix of ``keys`` with which an accepted context begins."""
        if not (path := self._tree.follow([bytes.fromhex(key) for key in keys])):
            return 0
        # Pages that all contexts in a branch share with ``keys``, as far as they go. A branch is
        # made after its parent.
        shared: dict[int, int] = {}
        statement = "SELECT id, parent, start FROM branches ORDER BY id"
        for branch, parent, start in self._tree.read(statement):
            shared[branch] = path.get(branch, min(start, shared.get(parent, 0)))
        rows = self._tree.read(
            "SELECT branch, num_pages, attributes FROM contexts WHERE namespace = ? ORDER BY id",
            [self._namespace.key_bytes],
        )
        found: list[tuple[int, str]] = [
            (min(pages, shared.get(branch, 0)), text) for branch, pages, text in rows
        ]
        for length, text in sorted(found, key=lambda x: x[0], reverse=True):
            if not length or accept(self._parse(text)):
                return length
        return 0

    def remove(self, number: int) -> bool:
        """Remove a context; its pages stay. Returns whether it was there."""
        with self._tree.transaction():
            return self._tree.remove(number)

    def close(self) -> None:
        """Let go of the file."""
        self._tree.close()

    def _select(self, rule: str, values: Sequence[object]) -> list[Context]:
        rows = self._tree.read(
            f"SELECT id, num_tokens, attributes, created FROM contexts WHERE {rule}", values
        )
        return [
            Context(id=number, num_tokens=tokens, attributes=self._parse(text), created=created)
            for number, tokens, text, created in rows
        ]

    def _parse(self, text: str) -> dict[str, Any]:
        with self._tree.named_errors():
            attributes: dict[str, Any] = json.loads(text)
            return attributes


def _attributes_text(attributes: Mapping[str, Any]) -> str:
    """Canonical JSON of attributes.

    Raises:
        ConfigError: they are no JSON object.
    """
    try:
        text = json.dumps(dict(attributes), sort_keys=True, allow_nan=False)
        if json.loads(text) == dict(attributes):
            return text
    except (TypeError, ValueError):
        pass
    raise ConfigError(
        f"attributes: got {quoted(attributes)}, expected a JSON object such as "
        '{"tenant": "x", "year": 2026}'
    )
