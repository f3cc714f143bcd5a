r"""The format of a trace: the selections of decode steps, in chunks that are whole or absent.

::

    b"hisparse trace 3\n"
    chunk HEAD    a TraceHeader as JSON
    chunk STEP    selections of V visits; a visit is one decode step of one request
    ...
    chunk DONE    a TraceEnd as JSON; absent if the process was killed

A chunk is its kind (4 bytes), the number of bytes of its content (u32), the xxh3_64 checksum of
both and of the content (u64), and the content. All numbers are little-endian.

The content of STEP is V (u32), the sizes of L + 1 sections (u32), and the sections, each an array
of i32. The first has the visits: request numbers ``[V]`` and sequence lengths ``[V]``. The others
have one layer each: the lengths of the selections ``[V, H]``, and for each page, in the order of
``[V, H, length]``, the number of pages between it and the page before. In a section, the lowest
bytes of all numbers come first, the highest last; zlib compresses them.
"""

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import xxhash

from hisparse.errors import quoted, shorten
from hisparse.types import SelectionScope

MAGIC: Final = b"hisparse trace 3\n"
HEAD, STEP, DONE = b"HEAD", b"STEP", b"DONE"
#: Kind, bytes of the content, checksum.
CHUNK: Final = struct.Struct("<4sIQ")
#: The most bytes that a section may have before it is compressed.
MAX_SECTION_BYTES: Final = 64 << 20


@dataclass(frozen=True, kw_only=True)
class TraceHeader:
    """Where the selections of a trace come from.

    Attributes:
        note: the user's text, such as the model.
        algorithm: the algorithm that selected.
        scope: selection scope.
        page_size: S, tokens.
        page_bytes: bytes of K and V of one page in one row and layer.
        heads: H.
        max_pages: K, the most pages of a selection.
        layers: the layers that select.
        attended_by: for each of ``layers``, how many layers attend its selection.
        settings: the configuration.
        version: of hisparse.
        started: date and time, UTC.
    """

    chunk: ClassVar[bytes] = HEAD

    note: str
    algorithm: str
    scope: SelectionScope
    page_size: int
    page_bytes: int
    heads: int
    max_pages: int
    layers: tuple[int, ...]
    attended_by: tuple[int, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""
    started: str = ""

    def __post_init__(self) -> None:
        for name in ("page_size", "heads", "max_pages"):
            if not 0 < getattr(self, name) < 2**31:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected 1 to 2**31 - 1")
        if self.page_bytes < 0:
            raise ValueError(f"page_bytes: got {self.page_bytes}, expected 0 or more")
        if not self.layers or len(set(self.layers)) < len(self.layers) or min(self.layers) < 0:
            raise ValueError(f"layers: got {quoted(self.layers)}, expected different numbers")
        if len(self.attended_by) != len(self.layers) or min(self.attended_by) < 1:
            got = quoted(self.attended_by)
            raise ValueError(f"attended_by: got {got}, expected 1 or more for each of layers")


@dataclass(frozen=True, kw_only=True)
class TraceEnd:
    """How a recording ended.

    Attributes:
        dropped_steps: decode steps that the file lacks.
        reason: "closed", or why the recording stopped before.
    """

    chunk: ClassVar[bytes] = DONE

    dropped_steps: int
    reason: str


class Visits(NamedTuple):
    """Decode steps of requests, in the order of time.

    Attributes:
        requests: ``[V] int32``, number of the request, counted from 0 within the file.
        seq_lens: ``[V] int32``, tokens of the request, the new one included.
    """

    requests: np.ndarray
    seq_lens: np.ndarray


class LayerPages(NamedTuple):
    """The selections of one layer.

    Attributes:
        lengths: ``[V, H] int32``.
        pages: ``[sum of lengths] int32``, in the order of ``[V, H, length]``.
    """

    lengths: np.ndarray
    pages: np.ndarray


def checksum(kind: bytes, content: bytes) -> int:
    """The checksum of a chunk."""
    digest = xxhash.xxh3_64(kind + struct.pack("<I", len(content)))
    digest.update(content)
    return digest.intdigest()


def encode_chunk(kind: bytes, content: bytes) -> bytes:
    """A whole chunk."""
    return CHUNK.pack(kind, len(content), checksum(kind, content)) + content


def encode_about(about: TraceHeader | TraceEnd) -> bytes:
    """A chunk HEAD or DONE."""
    return encode_chunk(about.chunk, json.dumps(asdict(about)).encode())


def visits_that_fit(header: TraceHeader) -> int:
    """The most visits of a chunk; at least 1."""
    visit_bytes = 4 * header.heads * (1 + header.max_pages)
    return max(1, MAX_SECTION_BYTES // max(8, visit_bytes))


def encode_steps(visits: Visits, pages: np.ndarray) -> bytes:
    """The content of a chunk STEP.

    Args:
        visits: V of them.
        pages: ``[L, V, H, K] int32``, the selections of the layers, padded with -1.
    """
    packed = [_pack(np.stack(visits)), *(_pack(_layer_numbers(layer)) for layer in pages)]
    sizes = np.array([len(visits.requests), *map(len, packed)], dtype="<u4")
    return b"".join([sizes.tobytes(), *packed])


def _layer_numbers(pages: np.ndarray) -> np.ndarray:
    """The numbers of a layer's section, of ``[V, H, K] int32``."""
    chosen = pages >= 0
    lengths = chosen.sum(-1, dtype=np.int32)
    flat = pages[chosen]
    before = np.empty_like(flat)
    before[1:] = flat[:-1]
    before[_firsts(lengths)] = -1
    return np.concatenate([lengths.ravel(), flat - before - 1])


def _firsts(lengths: np.ndarray) -> np.ndarray:
    """Index of the first page of each selection that has one."""
    flat = lengths.ravel()
    starts: np.ndarray = (np.cumsum(flat) - flat)[flat > 0]
    return starts


def split_sections(content: bytes, num_layers: int) -> tuple[int, list[tuple[int, int]]]:
    """V, and the first and last byte of each section in the content of a chunk STEP.

    Raises:
        ValueError: the sizes do not add up to the content.
    """
    sizes = np.frombuffer(content[: 4 * (num_layers + 2)], dtype="<u4").astype(np.int64)
    ends = 4 * (num_layers + 2) + np.cumsum(sizes[1:])
    if len(sizes) != num_layers + 2 or ends[-1] != len(content) or not sizes[0]:
        got = f"visits and section sizes {shorten(sizes.tolist())} in {len(content)} bytes"
        raise ValueError(f"got {got}, expected 1 or more and {num_layers + 1} sizes that fill them")
    return int(sizes[0]), list(zip((ends - sizes[1:]).tolist(), ends.tolist(), strict=True))


def decode_visits(section: bytes, count: int) -> Visits:
    """The first section of a chunk with ``count`` visits.

    Raises:
        ValueError: the section is damaged.
    """
    numbers = _unpack(section)
    if len(numbers) != 2 * count:
        raise ValueError(f"got {len(numbers)} numbers of visits, expected {2 * count}")
    requests, seq_lens = numbers.reshape(2, count)
    if requests.min() < 0 or seq_lens.min() < 1:
        got = f"request {requests.min()} and length {seq_lens.min()}"
        raise ValueError(f"got {got}, expected numbers from 0 and sequence lengths from 1")
    return Visits(requests, seq_lens)


def decode_layer(section: bytes, count: int, header: TraceHeader) -> LayerPages:
    """A layer's section of a chunk with ``count`` visits.

    Raises:
        ValueError: the section is damaged.
    """
    numbers, rows = _unpack(section), header.heads * count
    lengths, gaps = numbers[:rows], numbers[rows:].astype(np.int64)
    if len(lengths) < rows:
        raise ValueError(f"got the lengths of {len(lengths)} selections, expected {rows}")
    if lengths.min() < 0 or lengths.max() > header.max_pages:
        got = f"{lengths.min()} to {lengths.max()}"
        raise ValueError(f"got selections of {got} pages, expected 0 to {header.max_pages}")
    if len(gaps) != (total := lengths.sum(dtype=np.int64)):
        raise ValueError(f"got {len(gaps)} pages, expected {total}, the sum of the lengths")
    ends = np.cumsum(gaps + 1)
    firsts = _firsts(lengths)
    before = np.repeat(ends[firsts] - gaps[firsts] - 1, lengths[lengths > 0])
    pages = ends - before - 1
    if len(pages) and (pages.min() < 0 or pages.max() >= 2**31):
        raise ValueError(f"got pages {pages.min()} to {pages.max()}, expected 0 to 2**31 - 1")
    return LayerPages(lengths.reshape(count, header.heads), pages.astype(np.int32))


def _pack(numbers: np.ndarray) -> bytes:
    planes = numbers.astype("<i4").reshape(-1, 1).view(np.uint8).T
    # Most gaps have one byte, so the other three are long runs. Matches of deflate beyond runs
    # save 1% of random selections and take half of the time.
    deflater = zlib.compressobj(1, strategy=zlib.Z_RLE)
    return deflater.compress(planes.tobytes()) + deflater.flush()


def _unpack(section: bytes) -> np.ndarray:
    """``[n] int32``."""
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(section, MAX_SECTION_BYTES + 1)
    except zlib.error as error:
        raise ValueError(f"got {error}, expected a section that zlib compressed") from None
    if not inflater.eof or inflater.unused_data or len(data) > MAX_SECTION_BYTES:
        got = f"a section of {len(section)} bytes that is cut off, too long or followed by more"
        raise ValueError(f"got {got}, expected one stream of {MAX_SECTION_BYTES} bytes at most")
    if len(data) % 4:
        raise ValueError(f"got a section of {len(data)} bytes, expected a multiple of 4")
    planes = np.frombuffer(data, np.uint8).reshape(4, -1)
    return np.ascontiguousarray(planes.T).view("<i4").ravel().astype(np.int32, copy=False)
