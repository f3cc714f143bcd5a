"""Segments and indexes of a store with changes that their own checks accept, so that a change gets
to the code behind: headers whose checksums fit, and tables that SQLite finds in order.
"""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
import struct
import tempfile
from pathlib import Path
from typing import Any

import xxhash

from hisparse.storage.namespace import (
    _CHECKSUM,
    _FIXED,
    _MAGIC,
    BLOCK_BYTES,
    _block_checksum,
    _is_whole,
)
from tests.hostile.mutations import mutated_object, mutated_text

_NUMBERS = (0, 1, 2, 63, 64, 4095, 4096, 12288, 2**16 - 1, 2**31, 2**32, 2**62, 2**63, 2**64 - 1)
_TIMES = (float("nan"), float("inf"), -1.0, 0.0, 1e11, 1e308, 5e-324)
_CELLS: tuple[Any, ...] = (
    -(2**63), -4096, -1, 0, 1, 3, 4095, 4096, 8192, 12288, 24576, 2**31, 2**40, 2**62, 2**63 - 1,
    0.5, 1e300, "", "1", "x" * 5000, b"", b"\xff" * 32, None,
)  # fmt: skip
#: What a tool, another version or an attacker may do to the tables.
_STATEMENTS = (
    "DROP TRIGGER added", "DROP TRIGGER moved", "DROP INDEX pages_by_segment", "DROP TABLE pages",
    "DROP TABLE segments", "DROP TABLE namespaces", "ALTER TABLE pages ADD COLUMN novel",
    "ALTER TABLE segments RENAME COLUMN live TO dead", "CREATE TABLE novel (x)",
    "DELETE FROM segments", "DELETE FROM namespaces",
    "CREATE TRIGGER novel BEFORE INSERT ON pages BEGIN SELECT RAISE(ABORT, 'no'); END",
    "CREATE TRIGGER novel AFTER DELETE ON pages BEGIN DELETE FROM pages; END",
    "CREATE VIEW novel AS SELECT * FROM pages", "PRAGMA user_version = 77",
    "INSERT INTO pages SELECT 1, randomblob(32), segment, offset, bytes, written, used, uses "
    "FROM pages LIMIT 1",
    "UPDATE pages SET offset = (SELECT max(offset) FROM pages)",
    "UPDATE segments SET id = id + 1", "UPDATE namespaces SET id = id + 1",
)  # fmt: skip
#: Tables, and columns that together name a row.
_TABLES = {"namespaces": ("id",), "segments": ("id",), "pages": ("namespace", "key")}


def records_of(segment: bytes) -> list[int]:
    """Offsets of the headers of a segment; empty if it is none."""
    blocks = range(0, len(segment) - BLOCK_BYTES + 1, BLOCK_BYTES)
    return [at for at in blocks if _is_whole(segment[at : at + BLOCK_BYTES])]


def resealed_segment(rng: random.Random, segment: bytes, offsets: list[int]) -> bytes:
    """The segment with a change in one header, whose checksum fits.

    Raises:
        ValueError, RecursionError: the header is not as expected.
    """
    at = rng.choice(offsets)
    block = _changed_header(rng, segment[at : at + BLOCK_BYTES])
    return segment[:at] + block + segment[at + BLOCK_BYTES :]


def _changed_header(rng: random.Random, block: bytes) -> bytes:
    _, _, namespace_key, size, written, count, key_size, text_size = _FIXED.unpack_from(block)
    start = _FIXED.size + 16 * count
    numbers, key = block[_FIXED.size : start], block[start : start + key_size]
    text = block[start + key_size : start + key_size + text_size]
    change = rng.randrange(6)
    if change == 0:
        text, fits = _changed_text(rng, text), rng.random()
        text_size = len(text) if fits < 0.9 else rng.choice(_NUMBERS)
        namespace_key = xxhash.xxh3_128_digest(text) if fits > 0.2 else namespace_key
        size = rng.choice((size, size + BLOCK_BYTES, *_NUMBERS))
    elif change == 1:
        size, count = rng.choice(((rng.choice(_NUMBERS), count), (size, rng.choice(_NUMBERS))))
    elif change == 2:
        written = rng.choice(_TIMES)
    elif change == 3:
        # Never a key of a page: bytes under a key that is not theirs are a forgery.
        key = rng.randbytes(rng.choice((0, 1, 32, 64, 65, 1000)))
        key_size = len(key) if rng.random() < 0.8 else rng.choice(_NUMBERS)
    elif change == 4:
        at = 8 * rng.randrange(len(numbers) // 8 + 1)  # A count that was changed may be any.
        numbers = numbers[:at] + struct.pack("<Q", rng.choice(_NUMBERS)) + numbers[at + 8 :]
    else:
        namespace_key = rng.randbytes(16)
    fixed = _FIXED.pack(
        _MAGIC, 0, namespace_key, min(size, 2**64 - 1), written, min(count, 2**16 - 1),
        min(key_size, 2**16 - 1), min(text_size, 2**32 - 1),
    )  # fmt: skip
    changed = bytearray((fixed + numbers + key + text)[:BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0"))
    _CHECKSUM.pack_into(changed, 0, _MAGIC, _block_checksum(changed))
    return bytes(changed)


def _changed_text(rng: random.Random, text: bytes) -> bytes:
    """Text of a namespace with a change in its JSON, its characters or its bytes."""
    way = rng.randrange(3)
    if way == 0:
        value = mutated_object(rng, json.loads(text))
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    if way == 1:
        return mutated_text(rng, text.decode()).encode("utf-8", "surrogatepass")
    return rng.randbytes(rng.randrange(3000))


def is_index(data: bytes) -> bool:
    """Whether a file begins as those of SQLite do."""
    return data.startswith(b"SQLite format 3\0")


def changed_index(rng: random.Random, data: bytes) -> bytes:
    """The index with a change that SQLite makes; the file as it is where SQLite refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "index.sqlite"
        path.write_bytes(data)
        database = sqlite3.connect(path, isolation_level=None)
        with contextlib.closing(database), contextlib.suppress(sqlite3.Error, OverflowError):
            database.execute("PRAGMA journal_mode = DELETE")
            database.execute("PRAGMA ignore_check_constraints = 1")
            if rng.random() < 0.3:
                database.execute(rng.choice(_STATEMENTS))
            else:
                _change_cell(rng, database)
        return path.read_bytes()


def _change_cell(rng: random.Random, database: sqlite3.Connection) -> None:
    table = rng.choice(list(_TABLES))
    names = _TABLES[table]
    rows = database.execute(f"SELECT {', '.join(names)} FROM {table}").fetchall()
    if not rows:
        return
    columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
    column, row = rng.choice(columns), rng.choice(rows)
    where = " AND ".join(f"{name} = ?" for name in names)
    found = database.execute(f"SELECT {column} FROM {table} WHERE {where}", row).fetchone()[0]
    value = rng.choice(_CELLS)
    if isinstance(found, int) and rng.random() < 0.5:
        # As a flipped bit leaves it.
        value = (found ^ 1 << rng.randrange(63)) if rng.random() < 0.7 else found + 4096
    elif isinstance(found, str) and rng.random() < 0.7:
        value = _changed_text(rng, found.encode()).decode("utf-8", "replace")
    database.execute(f"UPDATE {table} SET {column} = ? WHERE {where}", (value, *row))
