"""Chunks of a changed trace with fitting checksums, so that a change gets to the code behind."""

from __future__ import annotations

import json
import random
import struct
import zlib

from hisparse.trace.format import CHUNK, DONE, HEAD, MAGIC, STEP, encode_chunk
from tests.hostile.mutations import damaged, mutated_object

#: Longer sections are left as they are: a change need not be large.
_MOST_BYTES = 1 << 20

Chunk = tuple[bytes, bytes]


def chunks_of(data: bytes) -> list[Chunk]:
    """Kind and content of each whole chunk of a trace; empty if it is none."""
    found, at = [], len(MAGIC)
    while data.startswith(MAGIC) and at + CHUNK.size <= len(data):
        kind, size, _ = CHUNK.unpack(data[at : at + CHUNK.size])
        at += CHUNK.size
        if at + size > len(data):
            break
        found.append((kind, data[at : at + size]))
        at += size
    return found


def resealed(rng: random.Random, chunks: list[Chunk]) -> bytes:
    """The trace with a change in one chunk; all checksums fit.

    Raises:
        ValueError, RecursionError: the chunk is not as expected.
    """
    at = rng.randrange(len(chunks))
    kind, content = chunks[at]
    if kind in (HEAD, DONE):
        content = json.dumps(mutated_object(rng, json.loads(content))).encode()
    elif kind == STEP and rng.random() < 0.8:
        content = _with_changed_section(rng, content, _num_sections(chunks))
    else:
        content = damaged(rng, content or b"?")
    changed = [*chunks[:at], (kind, content), *chunks[at + 1 :]]
    return MAGIC + b"".join(encode_chunk(*chunk) for chunk in changed)


def _num_sections(chunks: list[Chunk]) -> int:
    header = json.loads(chunks[0][1])
    layers = header.get("layers") if isinstance(header, dict) else None
    if not isinstance(layers, list):
        raise ValueError("no layers")
    return 1 + len(layers)


def _with_changed_section(rng: random.Random, content: bytes, count: int) -> bytes:
    """A change before compression, which reaches what decodes pages."""
    start = 4 * (1 + count)
    if len(content) < start:
        raise ValueError("cut off")
    visits, *sizes = struct.unpack(f"<{1 + count}I", content[:start])
    sections = []
    for size in sizes:
        sections.append(content[start : start + size])
        start += size
    at = rng.randrange(count)
    try:
        plain = zlib.decompressobj().decompress(sections[at], _MOST_BYTES)
    except zlib.error:
        raise ValueError("not compressed") from None
    sections[at] = zlib.compress(damaged(rng, plain or b"?"), 1)
    lengths = struct.pack(f"<{1 + count}I", visits, *map(len, sections))
    return lengths + b"".join(sections)
