"""What pages share, their keys, and the record of a page in a segment.

A record is one block of header, then the parts, padded to a block. Little-endian; offsets in
bytes::

    0   8  magic; its last byte is the version of the format
    8   8  xxh3_64 of bytes 16 to 4096
    16  16 key of the namespace
    32  8  bytes of the record, header and padding included: a multiple of 4096
    40  8  when it was written, seconds since 1970 (float64)
    48  2  number of parts
    50  2  bytes of the page's key
    52  4  bytes of the namespace's text
    56     sizes of the parts (8 bytes each), xxh3_64 of the parts (8 bytes each), the page's key,
           the namespace's text (JSON), zeros to 4096

The namespace's text is there so that an index can be rebuilt from segments alone.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import numpy as np
import xxhash

from hisparse.errors import ConfigError, quoted
from hisparse.options import from_options, parse_object


def page_keys(token_ids: np.ndarray, page_tokens: int) -> list[str]:
    """Keys of the whole pages of a sequence, in order.

    A key is SHA-256 of the key before and of the page's tokens, 32 bits each, least byte first.
    These are the keys of SGLang's radix cache for requests without an adapter or a salt.

    Args:
        token_ids: ``[n]``, integers of 0 to 2^32 - 1.
        page_tokens: tokens of a page.

    Returns:
        A key of 64 hexadecimal digits for each whole page.
    """
    data = np.ascontiguousarray(token_ids, dtype="<u4").tobytes()
    size, before, keys = 4 * page_tokens, b"", []
    for start in range(0, len(data) - size + 1, size):
        before = hashlib.sha256(before + data[start : start + size]).digest()
        keys.append(before.hex())
    return keys


#: Sizes and checksums of so many parts fit into the header of a record.
MAX_PARTS = 64
#: A header has one block for these and all else, whatever is escaped in JSON.
_MAX_TEXT = 256
_MAX_PAGE_BYTES = 1 << 31


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """What pages must have in common to be exchanged.

    Nothing here says how a server lays out its memory, so that servers with other layouts, budgets
    and algorithms exchange pages.

    Attributes:
        model: fingerprint of the weights and of all that changes K and V; 1 to 256 ASCII
            characters.
        kv_dtype: of K and V, such as "bfloat16" or "fp8_e4m3"; 1 to 256 ASCII characters.
        page_size: tokens of a page.
        rank: which share of the heads or layers a page holds, from 0.
        num_ranks: into how many shares the model is divided.
        part_bytes: sizes of the parts of a page, 1 to 64 of them. A part has a checksum; 256
            KiB and more let reader threads overlap.
        version: of the arrangement of bytes in a page, which the writer defines.

    Raises:
        ConfigError: a value is out of range.
    """

    model: str
    kv_dtype: str
    page_size: int
    rank: int
    num_ranks: int
    part_bytes: tuple[int, ...]
    version: int = 1

    def __post_init__(self) -> None:
        for name in ("model", "kv_dtype"):
            text = getattr(self, name)
            if not 0 < len(text) <= _MAX_TEXT or not (text.isascii() and text.isprintable()):
                expected = f"1 to {_MAX_TEXT} printable ASCII characters"
                raise ConfigError(f"namespace: {name}: got {quoted(text)}, expected {expected}")
        for name, value, low, high in (
            ("page_size", self.page_size, 1, 2**31),
            ("num_ranks", self.num_ranks, 1, 2**31),
            ("rank", self.rank, 0, self.num_ranks),
            ("version", self.version, 0, 2**31),
            ("number of parts", len(self.part_bytes), 1, MAX_PARTS + 1),
            ("smallest part", min(self.part_bytes, default=1), 1, _MAX_PAGE_BYTES),
            ("bytes of a page", sum(self.part_bytes), 1, _MAX_PAGE_BYTES),
        ):
            if not low <= value < high:
                expected = f"{low:,} to {high - 1:,}"
                raise ConfigError(f"namespace: {name}: got {quoted(value)}, expected {expected}")

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page: the sum of its parts."""
        return sum(self.part_bytes)

    @cached_property
    def text(self) -> str:
        """Canonical JSON: equal namespaces have the same text."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @cached_property
    def key(self) -> str:
        """32 hexadecimal digits: xxh3_128 of :attr:`text`."""
        return self.key_bytes.hex()

    @cached_property
    def key_bytes(self) -> bytes:
        """The 16 bytes of :attr:`key`."""
        return xxhash.xxh3_128_digest(self.text.encode())

    @classmethod
    def parse(cls, text: str) -> Namespace:
        """Read :attr:`text`.

        Raises:
            ConfigError: it is no such text.
        """
        found = parse_object(text, "namespace", '{"model": "...", ...}')
        return from_options(cls, "namespace", "namespace", found)


#: Records begin and end at multiples of this, where a lost one's successor is looked for.
BLOCK_BYTES: Final = 4096
MAX_KEY_BYTES: Final = 64
_MAGIC: Final = b"hiSpage\x01"
_FIXED: Final = struct.Struct("<8sQ16sQdHHI")
_CHECKED_FROM: Final = 16
#: A time beyond it, or none at all, is not from a clock.
END_OF_TIME: Final = 1e11
_CHECKSUM: Final = struct.Struct("<8sQ")


class Header(NamedTuple):
    """The header of a record: its size, when it was written, and checksums of the page's parts."""

    namespace: Namespace
    key: bytes
    num_bytes: int
    written: float
    checksums: tuple[int, ...]


def key_bytes(key: str) -> bytes:
    """The bytes of a hexadecimal key.

    Raises:
        ConfigError: the key is malformed.
    """
    try:
        found = bytes.fromhex(key)
    except (ValueError, TypeError):
        found = b""
    if not 0 < len(found) <= MAX_KEY_BYTES or 2 * len(found) != len(key):
        expected = f"2 to {2 * MAX_KEY_BYTES} hexadecimal digits, an even number"
        raise ConfigError(f"key: got {quoted(key)}, expected {expected}")
    return found


def joined_keys(keys: Sequence[str]) -> bytes:
    """The bytes of keys of one length, one after the other; see :func:`key_bytes`."""
    size = len(key_bytes(keys[0]))
    try:
        data = bytes.fromhex("".join(keys))
    except ValueError:
        data = b""
    return data if len(data) == size * len(keys) else b"".join(map(key_bytes, keys))


def parts_of(page: memoryview, namespace: Namespace) -> Iterator[memoryview]:
    """The parts of a page, one after the other."""
    for first, end in pairwise(accumulate(namespace.part_bytes, initial=0)):
        yield page[first:end]


def record_bytes(page_bytes: int) -> int:
    """Bytes of a record, in whole blocks."""
    return BLOCK_BYTES * (1 + -(-page_bytes // BLOCK_BYTES))


def make_header(namespace: Namespace, key: bytes, page: memoryview, now: float) -> bytes:
    """The header of a record that is written at the time ``now``."""
    text, count = namespace.text.encode(), len(namespace.part_bytes)
    checksums = map(xxhash.xxh3_64_intdigest, parts_of(page, namespace))
    fixed = _FIXED.pack(
        _MAGIC, 0, namespace.key_bytes, record_bytes(namespace.page_bytes), now,
        count, len(key), len(text),
    )  # fmt: skip
    numbers = struct.pack(f"<{2 * count}Q", *namespace.part_bytes, *checksums)
    block = bytearray((fixed + numbers + key + text).ljust(BLOCK_BYTES, b"\0"))
    _CHECKSUM.pack_into(block, 0, _MAGIC, _block_checksum(block))
    return bytes(block)


def _block_checksum(block: bytes | bytearray | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(memoryview(block)[_CHECKED_FROM:BLOCK_BYTES])


def _is_whole(block: bytes | bytearray | memoryview) -> bool:
    return len(block) >= BLOCK_BYTES and _CHECKSUM.unpack_from(block) == (
        _MAGIC,
        _block_checksum(block),
    )


#: Records of few namespaces follow each other.
_parse = lru_cache(64)(Namespace.parse)


def damaged_part(page: memoryview, header: Header) -> str | None:
    """Which part of a page is not the one of its header, if any."""
    for number, part in enumerate(parts_of(page, header.namespace)):
        if xxhash.xxh3_64_intdigest(part) != header.checksums[number]:
            return f"checksum of part {number}"
    return None


def read_header(block: bytes | memoryview) -> Header | None:
    """The header in a block of a segment, or None if there is none that can be trusted."""
    if not _is_whole(block):
        return None
    _, _, namespace_key, num_bytes, written, count, key_size, text_size = _FIXED.unpack_from(block)
    start = _FIXED.size + 16 * count
    rest = bytes(block[start:])
    key = rest[:key_size]
    try:
        namespace = _parse(rest[key_size:][:text_size].decode())
    except ValueError:  # ConfigError and UnicodeDecodeError are ValueErrors.
        return None
    fits = (
        namespace.key_bytes == namespace_key
        and len(namespace.part_bytes) == count
        and record_bytes(namespace.page_bytes) == num_bytes
        and 0 < len(key) == key_size <= MAX_KEY_BYTES
        and 0 <= written < END_OF_TIME
    )
    if not fits:
        return None
    checksums = struct.unpack_from(f"<{count}Q", block, _FIXED.size + 8 * count)
    return Header(namespace, key, num_bytes, written, checksums)
