"""How many of a sequence's pages are stored from the first on, in few statements.

Pages of a prompt are written one after the other, so most of them lie side by side in a segment. A
*run* reads the keys that follow a page in its segment, in one statement, and compares them with
those that are wanted. Where runs are short, a *walk* looks up key by key, in one statement too,
and stops at the first that is absent. A binary search would be wrong: a page in the middle can be
absent while later ones are stored, because it was evicted before them, refused by a full disk, or
dropped as damaged.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, Final

from hisparse.storage.namespace import MAX_KEY_BYTES, key_bytes

#: Records that a run spans: the fewest, and the most. It grows while all its pages are wanted.
_FEW, _MANY = 64, 8192
#: Shorter runs are not worth their statement; so many keys are then walked.
_SHORT: Final = 16
_WALKED: Final = 512

#: Keys that lie in a segment from one key on, joined. None if that key is not there.
_RUN: Final = """
WITH first AS (SELECT segment, offset FROM pages WHERE namespace = ? AND key = ?)
SELECT CAST(group_concat(page.key, '') AS BLOB)
FROM first CROSS JOIN pages AS page INDEXED BY pages_by_segment
WHERE page.segment = first.segment
    AND page.offset >= first.offset AND page.offset < first.offset + ?
    AND page.namespace = ? AND length(page.key) = ?
"""
#: How many of a number of keys, joined, are there, up to the first that is not.
_WALK: Final = """
WITH RECURSIVE walk (i) AS (
    SELECT 0 UNION ALL SELECT i + 1 FROM walk WHERE i < ? AND EXISTS (
        SELECT 1 FROM pages WHERE namespace = ? AND key = substr(?, ? * i + 1, ?) AND used >= ?
    )
) SELECT max(i) FROM walk
"""


class PrefixSearch:
    """Looks up prefixes of one namespace.

    Args:
        read: runs a statement with its values, and returns all rows.
        namespace: number of the namespace.
        num_bytes: of a record of the namespace.
        used_since: pages that the index last saw used before this time count as absent; 0: none.
    """

    def __init__(
        self,
        read: Callable[[str, Sequence[object]], list[tuple[Any, ...]]],
        namespace: int,
        num_bytes: int,
        used_since: float,
    ) -> None:
        self._read, self._namespace, self._num_bytes = read, namespace, num_bytes
        self._used_since = used_since

    def end(self, keys: Sequence[str], start: int) -> int:
        """Index of the first absent key at or after ``start``; the number of keys if there is none.

        Raises:
            ConfigError: a key that was looked up is malformed.
        """
        # Records to read, and records that the run so far has spanned.
        window, spanned = _FEW, 0
        while start < len(keys):
            first = key_bytes(keys[start])
            # When a page was used is not in the order of places: a run would look up each page.
            if not self._used_since:
                span = min(window, len(keys) - start)
                stored = self._run(first, span)
                part = _alike(keys, start, len(stored) // len(first))
                run = _num_equal(part, stored)
                start += run
                if run == len(part):
                    window, spanned = min(2 * window, _MANY), spanned + span
                else:
                    # The next run may be as long as this one was, or a little longer.
                    spanned += span * run // len(part)
                    window, spanned = min(max(spanned * 9 // 8, _FEW), _MANY), 0
                if run >= _SHORT:
                    continue
            part = _alike(keys, start, _WALKED)
            found = self._walk(part) if part else 0
            start += found
            if found < len(part):
                break
        return start

    def _run(self, key: bytes, span: int) -> bytes:
        """Keys of the pages among ``span`` records from that of ``key`` on; none if it is absent.

        Keys of another length are left out.
        """
        number = self._namespace
        values = [number, key, span * self._num_bytes, number, len(key)]
        return self._read(_RUN, values)[0][0] or b""

    def _walk(self, keys: Sequence[str]) -> int:
        size = len(keys[0]) // 2
        values = [len(keys), self._namespace, _joined(keys), size, size, self._used_since]
        return int(self._read(_WALK, values)[0][0])


def _alike(keys: Sequence[str], start: int, count: int) -> Sequence[str]:
    """At most ``count`` keys from ``start`` on, of one length."""
    part = keys[start : start + count]
    if len(set(map(len, part))) < 2:
        return part
    return list(takewhile(lambda key: len(key) == len(part[0]), part))


def _joined(keys: Sequence[str]) -> bytes:
    """The bytes of keys of one length, one after the other.

    Raises:
        ConfigError: a key is malformed.
    """
    size = len(keys[0])
    try:
        data = bytes.fromhex("".join(keys))
    except (ValueError, TypeError):
        data = b""
    if size % 2 or size > 2 * MAX_KEY_BYTES or 2 * len(data) != size * len(keys):
        return b"".join(map(key_bytes, keys))
    return data


def _num_equal(keys: Sequence[str], stored: bytes) -> int:
    """How many keys of one length ``stored`` begins with."""
    if not keys or stored.startswith(wanted := _joined(keys)):
        return len(keys)
    size, counts = len(keys[0]) // 2, range(1, len(keys) + 1)
    return bisect_left(counts, True, key=lambda n: not stored.startswith(wanted[: n * size]))
